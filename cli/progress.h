// SPDX-License-Identifier: Apache-2.0
// Tier: command line. A bar on stderr. It is an Executor that counts the tasks passing through, so
// it shows the real work items of the library, works for one long batch entry as for many, and
// cannot change a result.
#pragma once
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

#include "qkv/runtime.h"

namespace qkv::cli {

class Progress final : public Executor {
 public:
  Progress() : start_(Clock::now()) {}
  /// An error before finish() starts on a clean line.
  ~Progress() override {
    if (!is_finished_ && last_ms_.load() > 0) fmt::print(stderr, "\r{:{}}\r", "", kWidth + 60);
  }

  void run(int64_t num_tasks, int num_threads, void (*task)(void* context, int64_t index),
           void* context) override {
    ++step_;
    Step step{this, task, context, num_tasks, 0};
    default_executor().run(num_tasks, num_threads, &Progress::counted, &step);
  }

  /// The last line of the bar.
  void finish() {
    is_finished_ = true;
    fmt::print(stderr, "\r[{}] 100 %  {:.1f} s{:30}\n", std::string(kWidth, '#'), seconds(), "");
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kWidth = 30;
  static constexpr int64_t kInterval_ms = 100;  // between two drawings; the first comes after it

  struct Step {
    Progress* bar;
    void (*task)(void*, int64_t);
    void* context;
    int64_t num_tasks;
    std::atomic<int64_t> done;
  };

  static void counted(void* context, int64_t index) {
    Step& step = *static_cast<Step*>(context);
    step.task(step.context, index);
    step.bar->draw(step.done.fetch_add(1) + 1, step.num_tasks);
  }

  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  void draw(int64_t done, int64_t num_tasks) {
    const int64_t now_ms = static_cast<int64_t>(seconds() * 1e3);
    int64_t last_ms = last_ms_.load();
    if (now_ms - last_ms < kInterval_ms || !last_ms_.compare_exchange_strong(last_ms, now_ms))
      return;
    const int filled = static_cast<int>(kWidth * done / num_tasks);
    fmt::print(stderr, "\r[{:<{}}] {:3} %  step {}, {} of {} work items, {:.1f} s ",
               std::string(static_cast<size_t>(filled), '#'), kWidth, 100 * done / num_tasks,
               step_.load(), done, num_tasks, now_ms * 1e-3);
    std::fflush(stderr);
  }

  Clock::time_point start_;
  std::atomic<int64_t> step_{0};
  std::atomic<int64_t> last_ms_{0};
  bool is_finished_ = false;
};

}  // namespace qkv::cli
