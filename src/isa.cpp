// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Instruction sets by name. Highway keeps one choice per process, which every dynamic
// dispatch reads; forcing a set narrows the list of targets that Highway believes the CPU to have.
#include "isa.h"

#include <pthread.h>

#include <cstdlib>
#include <iterator>

// clang-format off
#include "kernels/targets.h"  // before Highway, which reads it
#include "hwy/targets.h"
// clang-format on
#include "qkv/error.h"

namespace qkv::isa {

std::mutex mutex;
namespace internal {
std::atomic<uint32_t> epoch{0};
}

namespace {

struct Row {
  std::string_view name;
  int64_t targets;  // Highway targets, the best of which is taken
};
// Weakest first. "baseline" is what the compiler may assume everywhere: scalar code on x86-64.
constexpr Row kRows[] = {
    {"baseline", HWY_STATIC_TARGET},    {"sse4", HWY_SSE4}, {"neon", HWY_NEON}, {"avx2", HWY_AVX2},
    {"avx512", HWY_AVX3 | HWY_AVX3_DL},
};

Choice choice;         // guarded by mutex, as all that follows
int64_t detected = 0;  // what Highway finds before anything is forced; 0: not asked yet

// A child after fork() must not find the mutex held by a thread that it does not have.
[[maybe_unused]] const int at_fork =
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });

// Lower bits are better targets in Highway.
int64_t best_of(int64_t targets) { return targets & -targets; }

// What the kernels are compiled for and this machine runs, whatever is forced now.
int64_t runnable() {
  if (detected == 0) detected = hwy::SupportedTargets();
  return (detected & HWY_TARGETS) | HWY_STATIC_TARGET;
}

std::string_view name_of(int64_t target) {
  for (size_t i = std::size(kRows) - 1; i > 0; i--) {
    if (kRows[i].targets & target) return kRows[i].name;
  }
  return kRows[0].name;
}

std::vector<std::string> runnable_names() {
  std::vector<std::string> names;
  for (const Row& row : kRows) {
    if (row.targets & runnable()) names.emplace_back(row.name);
  }
  return names;
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

int64_t targets_of(std::string_view name, std::string_view who) {
  std::vector<std::string> known = {"auto"};
  for (const Row& row : kRows) {
    if (row.name == name) {
      if (const int64_t targets = row.targets & runnable()) return targets;
      throw Error(std::string(who) + ": " + std::string(kCannotRun) + std::string(name) +
                  ", it runs " + join(runnable_names()));
    }
    known.emplace_back(row.name);
  }
  throw Error(std::string(who) + ": unknown instruction set \"" + std::string(name) +
              "\", expected one of " + join(known));
}

// `who` is the environment variable or the function that asked.
void choose(std::string_view name, const char* who) {
  const bool is_auto = name == "auto";
  const int64_t targets = is_auto ? runnable() : targets_of(name, who);
  hwy::SetSupportedTargetsForTest(is_auto ? 0 : targets);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  const int64_t best = best_of(targets);
  choice = {std::string(name_of(best)), hwy::TargetName(best), best, is_auto ? "detected" : who};
  internal::epoch.fetch_add(1, std::memory_order_release);
}

}  // namespace

void internal::initialise() {
  const std::lock_guard lock(mutex);
  if (epoch.load(std::memory_order_relaxed) != 0) return;
  const char* wanted = std::getenv("QKV_ISA");
  choose(wanted != nullptr && *wanted != '\0' ? wanted : "auto", "QKV_ISA");
}

void force(std::string_view name) {
  const std::lock_guard lock(mutex);
  choose(name, "set_isa");
}

Choice current() {
  ensure_initialised();
  const std::lock_guard lock(mutex);
  return choice;
}

std::vector<std::string> available() {
  const std::lock_guard lock(mutex);
  return runnable_names();
}

}  // namespace qkv::isa
