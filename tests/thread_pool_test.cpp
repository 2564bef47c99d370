// SPDX-License-Identifier: Apache-2.0
// Tier: test. The pool: every task exactly once, whoever calls, however often, and nobody waits for
// a thread that has nothing to do.
#include "thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "fp_control.h"
#include "support/sanitizer.h"

namespace qkv {
namespace {

void run(Executor& pool, int64_t num_tasks, int num_threads, std::function<void(int64_t)> task) {
  pool.run(
      num_tasks, num_threads,
      [](void* context, int64_t i) { (*static_cast<std::function<void(int64_t)>*>(context))(i); },
      &task);
}

// Returns true if all of n tasks run at the same time: each waits until the others have begun.
bool all_at_once(Executor& pool, int n) {
  std::atomic<int> begun{0};
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  run(pool, n, n, [&](int64_t) {
    begun++;
    while (begun < n && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  });
  return std::chrono::steady_clock::now() < deadline;
}

// A row of counters for the exactly-once check, on its own allocation so that a task that runs late
// writes to freed memory.
class Counters {
 public:
  explicit Counters(int64_t n) : counts_(new std::atomic<int>[n]()), n_(n) {}
  void add(int64_t i) { counts_[i].fetch_add(1, std::memory_order_relaxed); }
  bool all_one() const {
    for (int64_t i = 0; i < n_; i++) {
      if (counts_[i].load(std::memory_order_relaxed) != 1) return false;
    }
    return true;
  }

 private:
  std::unique_ptr<std::atomic<int>[]> counts_;
  int64_t n_;
};

bool exactly_once(Executor& pool, int64_t num_tasks, int num_threads) {
  Counters counters(num_tasks);
  run(pool, num_tasks, num_threads, [&](int64_t i) { counters.add(i); });
  return counters.all_one();
}

TEST(ThreadPool, RandomSizesAndPauses_EveryTaskOnce) {
  ThreadPool pool;
  std::mt19937 random(1);
  for (int region = 0; region < 5000; region++) {
    const int64_t num_tasks = random() % (region % 10 == 0 ? 2000 : 20);
    const int num_threads = 1 + static_cast<int>(random() % 6);
    ASSERT_TRUE(exactly_once(pool, num_tasks, num_threads)) << num_tasks << " " << num_threads;
    if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  }
}

TEST(ThreadPool, RegionsBackToBack_LateWorkersTakeNothingOfTheNext) {
  ThreadPool pool;
  for (int region = 0; region < 50000; region++) {
    ASSERT_TRUE(exactly_once(pool, 2 + region % 3, 4)) << region;
  }
}

TEST(ThreadPool, CallersAtOnce_EachGetsItsOwnTasksOnce) {
  ThreadPool pool;
  std::atomic<int> failures{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; caller++) {
    callers.emplace_back([&, caller] {
      std::mt19937 random(caller);
      for (int region = 0; region < 500; region++) {
        failures += !exactly_once(pool, random() % 40, 1 + static_cast<int>(random() % 4));
        if (random() % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(failures, 0);
}

TEST(ThreadPool, MoreCallersThanJobSlots_AllProgress) {
  ThreadPool pool;
  const int n = ThreadPool::kMaxJobs + 20;
  std::atomic<int> inside{0};
  std::atomic<int> failures{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < n; caller++) {
    callers.emplace_back([&] {
      Counters counters(3);
      run(pool, 3, 2, [&](int64_t i) {
        if (i == 0) inside++;
        while (inside < n) std::this_thread::yield();  // all calls are open at once
        counters.add(i);
      });
      failures += !counters.all_one();
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(failures, 0);
}

TEST(ThreadPool, ZeroTasks_NothingRuns) {
  ThreadPool pool;
  run(pool, 0, 4, [](int64_t) { FAIL(); });
  run(pool, -3, 4, [](int64_t) { FAIL(); });
  EXPECT_EQ(pool.num_workers(), 0);
}

TEST(ThreadPool, OneThreadOrOneTask_RunsInTheCallerInOrder) {
  ThreadPool pool;
  const auto caller = std::this_thread::get_id();
  for (int num_threads : {1, 0, -1}) {
    std::vector<int64_t> order;
    run(pool, 100, num_threads, [&](int64_t i) {
      EXPECT_EQ(std::this_thread::get_id(), caller);
      order.push_back(i);
    });
    ASSERT_EQ(order.size(), 100u);
    for (int64_t i = 0; i < 100; i++) EXPECT_EQ(order[i], i);
  }
  run(pool, 1, 8, [&](int64_t) { EXPECT_EQ(std::this_thread::get_id(), caller); });
  EXPECT_EQ(pool.num_workers(), 0);
}

TEST(ThreadPool, Tasks_AreHandedOutInOrder) {
  ThreadPool pool;
  std::atomic<int64_t> begun{0};
  std::atomic<int64_t> largest_lead{0};
  const int num_threads = 4;
  run(pool, 2000, num_threads, [&](int64_t i) {
    const int64_t lead = i - begun.fetch_add(1);
    if (lead > largest_lead) largest_lead = lead;
  });
  EXPECT_LT(largest_lead, num_threads) << "a task began before one that stands earlier was taken";
}

TEST(ThreadPool, CallInsideATask_RunsInline) {
  ThreadPool pool;
  Counters counters(20 * 30);
  run(pool, 20, 4, [&](int64_t outer) {
    const auto thread = std::this_thread::get_id();
    run(pool, 30, 4, [&](int64_t inner) {
      EXPECT_EQ(std::this_thread::get_id(), thread);
      counters.add(outer * 30 + inner);
    });
  });
  EXPECT_TRUE(counters.all_one());
}

TEST(ThreadPool, MoreThreadsThanCores_AllRunAtOnce) {
  ThreadPool pool;
  const int n = 2 * static_cast<int>(std::thread::hardware_concurrency()) + 3;
  EXPECT_TRUE(all_at_once(pool, n));
  EXPECT_EQ(pool.num_workers(), n - 1);
}

TEST(ThreadPool, LaterCallWantsMore_ThePoolGrows) {
  ThreadPool pool;
  EXPECT_TRUE(all_at_once(pool, 2));
  EXPECT_EQ(pool.num_workers(), 1);
  EXPECT_TRUE(all_at_once(pool, 6));
  EXPECT_EQ(pool.num_workers(), 5);
  EXPECT_TRUE(all_at_once(pool, 3));
  EXPECT_EQ(pool.num_workers(), 5);
}

TEST(ThreadPool, FewerTasksThanThreads_StartsNoMoreWorkersThanTasks) {
  ThreadPool pool;
  EXPECT_TRUE(exactly_once(pool, 3, 50));
  EXPECT_EQ(pool.num_workers(), 2);
}

TEST(ThreadPool, NumThreads_CapsTheThreadsOfACall) {
  ThreadPool pool;
  ASSERT_TRUE(all_at_once(pool, 8));
  for (int num_threads : {2, 3, 5}) {
    for (int region = 0; region < 50; region++) {
      std::atomic<int> running{0};
      std::atomic<int> most{0};
      run(pool, 24, num_threads, [&](int64_t) {
        const int now = ++running;
        for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
        }
        std::this_thread::yield();
        running--;
      });
      ASSERT_LE(most, num_threads);
    }
  }
}

TEST(ThreadPool, WorkersBusyElsewhere_TheCallerDoesNotWaitForThem) {
  ThreadPool pool;
  std::atomic<int> held{0};
  std::atomic<bool> release{false};
  std::thread other([&] {
    run(pool, 4, 4, [&](int64_t) {
      held++;
      while (!release) std::this_thread::yield();
    });
  });
  while (held < 4) std::this_thread::yield();  // all three workers hold a task of the other call
  EXPECT_TRUE(exactly_once(pool, 100, 4));
  EXPECT_EQ(pool.num_workers(), 3);
  EXPECT_FALSE(release);
  release = true;
  other.join();
}

TEST(ThreadPool, AfterAPause_SleepingWorkersAreWoken) {
  ThreadPool pool;
  for (int i = 0; i < 50; i++) {
    ASSERT_TRUE(all_at_once(pool, 3)) << i;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(ThreadPool, TwoCallsAtOnce_ShareTheWorkers) {
  ThreadPool pool;
  ASSERT_TRUE(all_at_once(pool, 3));  // two workers, which the two calls need one each
  std::atomic<int> failures{0};
  auto caller = [&] {
    for (int i = 0; i < 20; i++) failures += !all_at_once(pool, 2);
  };
  std::thread first(caller), second(caller);
  first.join();
  second.join();
  EXPECT_EQ(failures, 0);
}

TEST(ThreadPool, MoreTasksThanTicketsCount_EveryTaskOnce) {
  ThreadPool pool;
  const int64_t n = (int64_t{1} << 24) + 12345;  // two tasks per ticket
  std::vector<std::atomic<uint8_t>> bytes(n);
  pool.run(
      n, 3,
      [](void* context, int64_t i) {
        (*static_cast<std::vector<std::atomic<uint8_t>>*>(context))[i].fetch_add(
            1, std::memory_order_relaxed);
      },
      &bytes);
  int64_t wrong = 0;
  for (const auto& byte : bytes) wrong += byte != 1;
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPool, TasksPerTicket_KeepsTheCountInItsBits) {
  for (int64_t n : {int64_t{1}, int64_t{1} << 24, (int64_t{1} << 24) - 1, (int64_t{1} << 24) - 2,
                    int64_t{1} << 40, std::numeric_limits<int64_t>::max()}) {
    const int64_t chunk = ThreadPool::tasks_per_ticket(n);
    const int64_t tickets = n / chunk + (n % chunk != 0);
    EXPECT_LT(tickets, int64_t{1} << 24) << n;
    EXPECT_GT(tickets, n < (int64_t{1} << 24) ? n - 1 : int64_t{1} << 22) << n;
    EXPECT_LE((tickets - 1), (n - 1) / chunk) << n;
  }
}

TEST(ThreadPool, AfterStop_CallsRunInTheCaller) {
  ThreadPool pool;
  ASSERT_TRUE(all_at_once(pool, 3));
  pool.stop();
  EXPECT_EQ(pool.num_workers(), 0);
  EXPECT_TRUE(exactly_once(pool, 100, 4));
  EXPECT_EQ(pool.num_workers(), 0);
}

TEST(ThreadPool, StopDuringAJob_TheJobEnds) {
  for (int i = 0; i < 20; i++) {
    ThreadPool pool;
    std::atomic<bool> begun{false};
    Counters counters(200);
    std::thread caller([&] {
      run(pool, 200, 4, [&](int64_t task) {
        begun = true;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        counters.add(task);
      });
    });
    while (!begun) std::this_thread::yield();
    pool.stop();
    caller.join();
    ASSERT_TRUE(counters.all_one());
  }
}

TEST(ThreadPool, FloatingPointMode_OfTheCallerHoldsInEveryTask) {
  ThreadPool pool;
  ASSERT_TRUE(all_at_once(pool, 4));
  const uint64_t before = fp_control();
#if defined(__SSE2__)
  const uint64_t other = before ^ 0x8040;  // flush to zero, denormals are zero
#elif defined(__aarch64__)
  const uint64_t other = before ^ (1u << 24);
#else
  const uint64_t other = before;
#endif
  for (const uint64_t mode : {other, before}) {
    set_fp_control(mode);
    std::atomic<int> wrong{0};
    std::atomic<int> begun{0};
    run(pool, 4, 4, [&](int64_t) {
      begun++;
      while (begun < 4) std::this_thread::yield();
      volatile float tiny = std::numeric_limits<float>::min();
      const bool is_flushed = tiny * 0.5f == 0.0f;
      wrong += fp_control() != mode || (mode == before && is_flushed);
    });
    const uint64_t after = fp_control();
    set_fp_control(before);
    EXPECT_EQ(after, mode) << "the caller's own mode must stay";
    EXPECT_EQ(wrong, 0);
  }
}

int exit_code_of(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ThreadPool, ChildAfterFork_StartsItsOwnWorkers) {
  ThreadPool& pool = ThreadPool::instance();
  ASSERT_TRUE(all_at_once(pool, 4));
  for (int i = 0; i < 10; i++) {
    if (i % 2)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // workers asleep or awake
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      const bool fresh = pool.num_workers() == 0;
      _exit(fresh && all_at_once(pool, 5) && exactly_once(pool, 1000, 3) ? 0 : 1);
    }
    EXPECT_EQ(exit_code_of(child), 0);
  }
  EXPECT_TRUE(all_at_once(pool, 4)) << "the parent's workers are as before";
}

TEST(ThreadPool, ForkWhileAnotherThreadCalls_ChildWorks) {
  if (test::kSanitizedAllocator)
    GTEST_SKIP() << "the sanitizer's allocator does not survive fork()";
  ThreadPool& pool = ThreadPool::instance();
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done) exactly_once(pool, 64, 3);
  });
  for (int i = 0; i < 10; i++) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      bool ok = true;
      int sum[8] = {};
      for (int region = 0; region < 20; region++) {
        pool.run(
            8, 4, [](void* context, int64_t k) { static_cast<int*>(context)[k]++; }, sum);
      }
      for (int n : sum) ok &= n == 20;
      _exit(ok ? 0 : 1);
    }
    EXPECT_EQ(exit_code_of(child), 0);
  }
  done = true;
  other.join();
}

// Made before all others and destroyed after the workers were joined: a static object of an
// application that computes when the process ends. A failure here shows as an exit code.
[[gnu::init_priority(101)]] const struct UsesThePoolAtExit {
  ~UsesThePoolAtExit() {
    if (!exactly_once(ThreadPool::instance(), 50, 4)) _exit(3);
    if (ThreadPool::instance().num_workers() != 0) _exit(4);
  }
} uses_the_pool_at_exit;

}  // namespace
}  // namespace qkv
