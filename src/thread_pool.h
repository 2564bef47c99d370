// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. The library's own pool of threads, behind Executor.
//
// A call of run() is a job: it takes one of the job slots, publishes its tasks there and works on
// them itself; workers that are awake help. The caller never waits for a worker that has not taken
// a task. Tasks are handed out in order, one at a time, by a ticket: one 64-bit word of (job
// number, tasks left). Whoever takes a ticket names the job it means, so a worker that comes late
// finds another number or nothing left, and can take nothing of the slot's next job. Workers look
// for work for kSpin after the last one, then sleep on a futex.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "qkv/runtime.h"

namespace qkv {

class ThreadPool final : public Executor {
 public:
  /// The process's pool. Its workers are joined at exit; calls after that run in the caller alone.
  /// A child after fork() starts workers of its own.
  static ThreadPool& instance();

  constexpr ThreadPool() = default;
  ~ThreadPool() override { stop(); }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  void run(int64_t num_tasks, int num_threads, void (*task)(void* context, int64_t index),
           void* context) override;

  /// Workers that were started. The pool grows when a call wants more.
  int num_workers() const { return num_workers_.load(std::memory_order_relaxed); }

  /// Joins the workers, for good. Jobs that run end first.
  void stop();

  /// Tasks handed out at a time: 1, unless the count of tickets would not fit its bits.
  static int64_t tasks_per_ticket(int64_t num_tasks) {
    const auto most = static_cast<int64_t>(kCountMask);
    return num_tasks / most + (num_tasks % most != 0);
  }

  static constexpr int kMaxWorkers = 1023;
  static constexpr int kMaxJobs = 64;  // calls at once that get help; more run in their callers

 private:
  // A word of (job number, count): 40 bits of number repeat after a day of jobs of 0.1 us.
  static constexpr int kCountBits = 24;
  static constexpr uint64_t kCountMask = (uint64_t{1} << kCountBits) - 1;
  static uint64_t count_of(uint64_t word) { return word & kCountMask; }
  static uint64_t number_of(uint64_t word) { return word >> kCountBits; }

  // 128: two cache lines, which some machines fetch in pairs.
  struct alignas(128) Job {
    std::atomic<bool> busy{false};    // a caller owns this slot
    std::atomic<uint64_t> ticket{0};  // (number, chunks that nobody has taken yet)
    std::atomic<uint64_t> seats{0};   // (number, helpers that may still join)
    std::atomic<uint32_t> helped{0};  // chunks that helpers have finished; the owner waits on it
    uint64_t number = 0;              // used by the owner only
    // Written by the owner before it publishes the ticket; read by whoever holds an unfinished
    // chunk.
    void (*task)(void*, int64_t) = nullptr;
    void* context = nullptr;
    int64_t num_tasks = 0;
    int64_t num_chunks = 0;
    int64_t chunk = 0;  // tasks_per_ticket
    uint64_t fp_control = 0;
  };

  union Process;
  static Process process;
  static const struct AtForkAndExit {
    AtForkAndExit();
    ~AtForkAndExit();
  } at_fork_and_exit;

  Job* claim_job();
  void grow(int num_workers);
  void wake(int wanted);
  void work(int worker);
  bool help_any(int worker);
  bool help(Job& job);
  static uint32_t drain(Job& job, uint64_t number);
  static void wait_for_helpers(Job& job, uint32_t num_chunks);
  void forget_threads();  // in a child after fork(), where only the calling thread lives on

  Job jobs_[kMaxJobs];
  alignas(64) std::atomic<uint32_t> published_{0};  // counts jobs; workers sleep on it
  alignas(64) std::atomic<int> spinning_{0};        // workers that look for work
  std::atomic<int> sleeping_{0};
  std::atomic<int> num_jobs_{0};  // slots that were ever used: [0, num_jobs_)
  std::atomic<int> num_workers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;  // guards workers_ and max_workers_
  std::vector<std::thread> workers_;
  int max_workers_ = kMaxWorkers;  // less after the system refused a thread
};

}  // namespace qkv
