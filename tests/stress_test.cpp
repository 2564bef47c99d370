// SPDX-License-Identifier: Apache-2.0
// Tier: test. Many threads use the process's pool at once for a while, in every way that is
// allowed: regions of all sizes, pauses, nested calls, changing caps, a pool of their own that
// comes and goes, children after fork(). Every task must run exactly once and nothing may hang: a
// watchdog ends the program if the threads stop making progress.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "qkv/runtime.h"
#include "support/process.h"
#include "support/sanitizer.h"
#include "thread_pool.h"

namespace qkv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kCallers = 5;
constexpr auto kStuck = std::chrono::seconds(30);

// QKV_STRESS_SECONDS, at most 60.
std::chrono::seconds duration() {
  const char* text = std::getenv("QKV_STRESS_SECONDS");
  return std::chrono::seconds(text != nullptr ? std::min(60, std::atoi(text)) : 15);
}

struct Region {
  std::vector<std::atomic<int>> counts;
  Executor* pool;
  int64_t inner;  // tasks of a nested call in each task; 0: none
  uint64_t spin;  // work per task
  std::atomic<int> running{0};
  std::atomic<int> most{0};

  Region(Executor* pool, int64_t n, int64_t inner, uint64_t spin)
      : counts(n), pool(pool), inner(inner), spin(spin) {}

  static void task(void* context, int64_t i) {
    Region& region = *static_cast<Region*>(context);
    const int now = ++region.running;
    for (int seen = region.most; now > seen && !region.most.compare_exchange_weak(seen, now);) {
    }
    for (volatile uint64_t k = 0; k < region.spin;) k = k + 1;
    if (region.inner > 0) {
      Region nested(region.pool, region.inner, 0, 0);
      region.pool->run(region.inner, 4, task, &nested);
      for (const auto& count : nested.counts) {
        if (count != 1) region.counts[i] += 1000;
      }
      if (nested.most > 1) region.counts[i] += 1000;  // inline means one at a time
    }
    region.counts[i]++;
    region.running--;
  }
};

// One region of a random kind; returns the number of things that went wrong.
int one_region(std::mt19937& random, Executor* pool) {
  const int64_t n = random() % 8 == 0 ? random() % 3000 : random() % 12;
  const int num_threads = static_cast<int>(random() % 8);
  const uint64_t spin = random() % 16 == 0 ? random() % 20000 : random() % 50;
  Region region(pool, n, random() % 16 == 0 ? 1 + random() % 5 : 0, spin);
  pool->run(n, num_threads, Region::task, &region);
  int wrong = region.running != 0;
  wrong += region.most > std::max(1, num_threads);
  for (const auto& count : region.counts) wrong += count != 1;
  return wrong;
}

TEST(Stress, ManyCallersInEveryWay_NothingLostNothingHangs) {
  const auto end = Clock::now() + duration();
  std::atomic<int64_t> regions{0};
  std::atomic<int> wrong{0};
  std::atomic<int> open{kCallers};

  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; caller++) {
    callers.emplace_back([&, caller] {
      std::mt19937 random(100 + caller);
      while (Clock::now() < end) {
        if (random() % 2000 == 0) {
          ThreadPool own;  // starts, works and is joined beside the others
          for (int i = 0; i < 20; i++) wrong += one_region(random, &own);
        }
        wrong += one_region(random, &default_executor());
        regions++;
        if (random() % 50 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
        }
      }
      open--;
    });
  }
  std::thread watchdog([&] {
    int64_t seen = -1;
    for (auto since = Clock::now(); open > 0;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (seen != regions) {
        seen = regions;
        since = Clock::now();
      } else if (Clock::now() - since > kStuck) {
        std::fprintf(stderr, "no region ended for 30 s: the pool hangs\n");
        _exit(1);
      }
    }
  });

  std::mt19937 random(7);
  int children = 0;
  while (!test::kSanitizedAllocator && Clock::now() < end) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      int bad = 0;
      for (int i = 0; i < 20; i++) bad += one_region(random, &default_executor());
      _exit(bad == 0 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    wrong += !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    children++;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  for (std::thread& caller : callers) caller.join();
  watchdog.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(regions, 100);
  RecordProperty("regions", std::to_string(regions));
  RecordProperty("children", children);
  std::printf("%lld regions, %d children\n", static_cast<long long>(regions.load()), children);
}

// The first use of everything in several threads, and fork() in the midst of it: a lock or a
// guarded static that is held at that moment stays held in the child for ever. Each try needs a new
// process.
TEST(Stress, ForkDuringFirstUse_ChildWorks) {
  if (test::kSanitizedAllocator)
    GTEST_SKIP() << "the sanitizer's allocator does not survive fork()";
  const char* delay = std::getenv("QKV_STRESS_FORK_AFTER_NS");
  if (delay == nullptr) {
    for (int i = 0; i < 100; i++) {
      const auto child =
          test::run_process("QKV_STRESS_FORK_AFTER_NS=" + std::to_string(i % 50 * 1000) + " " +
                            test::this_program() + " --gtest_filter=Stress.ForkDuringFirstUse*");
      ASSERT_EQ(child.exit_code, 0) << "try " << i << ": " << child.output;
    }
    return;
  }
  std::atomic<int> ready{0};
  const auto first_use = [] {
    Region region(&default_executor(), 10, 0, 10);
    default_executor().run(10, default_num_threads() + 2, Region::task, &region);
    return info().num_threads >= 1 && kernels::active().tile_kv > 0;
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; i++) {
    callers.emplace_back([&] {
      ready++;
      while (ready < 4) {
      }
      first_use();
    });
  }
  while (ready < 3) {
  }
  ready++;
  const auto start = Clock::now();
  while (Clock::now() - start < std::chrono::nanoseconds(std::atoi(delay))) {
  }
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(first_use() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace qkv
