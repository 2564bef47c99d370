// SPDX-License-Identifier: Apache-2.0
// Tier: schedule. See thread_pool.h for how jobs, tickets and seats work.
#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>

#include "fp_control.h"

namespace qkv {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread spins before it sleeps: about what a wake-up costs (25 to 35 us, Zen 4 guest).
constexpr auto kSpin = std::chrono::microseconds(30);

// True while this thread runs a task: run() is then a plain loop.
thread_local bool inside_task = false;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Spins until done() or the deadline; reading the clock costs more than a pause.
template <class Done>
bool spin_until(Done done, Clock::time_point deadline) {
  for (;;) {
    for (int i = 0; i < 16; i++) {
      if (done()) return true;
      pause();
    }
    if (Clock::now() >= deadline) return done();
  }
}

void run_inline(int64_t num_tasks, void (*task)(void*, int64_t), void* context) {
  const bool outer = inside_task;
  inside_task = true;
  for (int64_t i = 0; i < num_tasks; i++) task(context, i);
  inside_task = outer;
}

}  // namespace

void ThreadPool::run(int64_t num_tasks, int num_threads, void (*task)(void*, int64_t),
                     void* context) {
  if (num_tasks <= 0) return;
  Job* job = nullptr;
  if (num_tasks > 1 && num_threads > 1 && !inside_task) job = claim_job();
  if (job == nullptr) return run_inline(num_tasks, task, context);

  const int64_t chunk = tasks_per_ticket(num_tasks);
  const int64_t num_chunks = num_tasks / chunk + (num_tasks % chunk != 0);
  const int helpers =
      static_cast<int>(std::min<int64_t>({num_threads - 1, num_chunks - 1, kMaxWorkers}));
  if (num_workers() < helpers) grow(helpers);

  job->task = task;
  job->context = context;
  job->num_tasks = num_tasks;
  job->num_chunks = num_chunks;
  job->chunk = chunk;
  job->fp_control = fp_control();
  job->helped.store(0, std::memory_order_relaxed);
  const uint64_t number = ++job->number & (~uint64_t{0} >> kCountBits);
  job->seats.store(number << kCountBits | static_cast<uint64_t>(helpers),
                   std::memory_order_release);
  job->ticket.store(number << kCountBits | static_cast<uint64_t>(num_chunks),
                    std::memory_order_release);
  wake(helpers);

  const uint32_t own = drain(*job, number);
  wait_for_helpers(*job, static_cast<uint32_t>(num_chunks) - own);
  job->busy.store(false, std::memory_order_release);
}

ThreadPool::Job* ThreadPool::claim_job() {
  for (int i = 0; i < kMaxJobs; i++) {
    Job& job = jobs_[i];
    if (job.busy.load(std::memory_order_relaxed)) continue;
    if (job.busy.exchange(true, std::memory_order_acquire)) continue;
    int used = num_jobs_.load(std::memory_order_relaxed);
    while (used <= i && !num_jobs_.compare_exchange_weak(used, i + 1, std::memory_order_relaxed)) {
    }
    return &job;
  }
  return nullptr;
}

// Takes and runs chunks of job `number` until none is left. Returns how many.
// From a successful take until the owner learns that the chunk is done, the job's fields stand
// still.
uint32_t ThreadPool::drain(Job& job, uint64_t number) {
  uint32_t count = 0;
  inside_task = true;
  uint64_t ticket = job.ticket.load(std::memory_order_acquire);
  while (number_of(ticket) == number && count_of(ticket) != 0) {
    if (!job.ticket.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                          std::memory_order_acquire)) {
      continue;
    }
    if (count == 0 && fp_control() != job.fp_control) set_fp_control(job.fp_control);
    const int64_t begin = (job.num_chunks - static_cast<int64_t>(count_of(ticket))) * job.chunk;
    const int64_t end = begin + std::min(job.chunk, job.num_tasks - begin);
    for (int64_t i = begin; i < end; i++) job.task(job.context, i);
    count++;
    ticket = job.ticket.load(std::memory_order_acquire);
  }
  inside_task = false;
  return count;
}

void ThreadPool::wait_for_helpers(Job& job, uint32_t num_chunks) {
  const auto done = [&] { return job.helped.load(std::memory_order_acquire) == num_chunks; };
  if (done() || spin_until(done, Clock::now() + kSpin)) return;
  for (;;) {
    const uint32_t helped = job.helped.load(std::memory_order_acquire);
    if (helped == num_chunks) return;
    job.helped.wait(helped, std::memory_order_acquire);
  }
}

// Announces a job. Together with work(): a worker counts itself as sleeping and then looks at
// published_ again, this function changes published_ and then counts sleepers, all in one total
// order; so either the worker sees the job or it is seen here.
void ThreadPool::wake(int wanted) {
  published_.fetch_add(1);
  const int missing = wanted - spinning_.load();
  const int sleeping = sleeping_.load();
  if (missing <= 0 || sleeping <= 0) return;
  if (missing >= sleeping) return published_.notify_all();
  for (int i = 0; i < missing; i++) published_.notify_one();
}

void ThreadPool::work(int worker) {
  spinning_.fetch_add(1);
  Clock::time_point deadline = Clock::now() + kSpin;
  for (;;) {
    const uint32_t seen = published_.load();
    if (stopping_.load(std::memory_order_acquire)) break;
    if (help_any(worker)) {
      deadline = Clock::now() + kSpin;
      continue;
    }
    if (spin_until([&] { return published_.load(std::memory_order_relaxed) != seen; }, deadline)) {
      continue;  // with the same deadline: jobs that have no seat for this worker keep it awake no
                 // longer
    }
    spinning_.fetch_sub(1);
    sleeping_.fetch_add(1);
    published_.wait(seen);
    sleeping_.fetch_sub(1);
    spinning_.fetch_add(1);
    deadline = Clock::now() + kSpin;
  }
  spinning_.fetch_sub(1);
}

// Starts at another slot for each worker, so that jobs published together share the workers.
bool ThreadPool::help_any(int worker) {
  const int used = num_jobs_.load(std::memory_order_relaxed);
  bool helped = false;
  for (int i = 0; i < used; i++) helped |= help(jobs_[(worker + i) % used]);
  return helped;
}

// Joins the job in this slot if it has tasks and a seat left, and works until its tasks are taken.
bool ThreadPool::help(Job& job) {
  uint64_t seats = job.seats.load(std::memory_order_acquire);
  do {
    const uint64_t ticket = job.ticket.load(std::memory_order_acquire);
    if (count_of(seats) == 0 || count_of(ticket) == 0 || number_of(ticket) != number_of(seats)) {
      return false;
    }
  } while (!job.seats.compare_exchange_weak(seats, seats - 1, std::memory_order_acq_rel,
                                            std::memory_order_acquire));
  spinning_.fetch_sub(1);
  const uint32_t count = drain(job, number_of(seats));
  if (count != 0) {
    job.helped.fetch_add(count, std::memory_order_release);
    job.helped.notify_one();  // the slot outlives the job: at worst this wakes the next owner early
  }
  spinning_.fetch_add(1);
  return count != 0;
}

// New threads find the job by themselves; a system that refuses a thread is not asked again.
void ThreadPool::grow(int num_workers) {
  const std::lock_guard lock(mutex_);
  num_workers = std::min(num_workers, max_workers_);
  if (stopping_.load(std::memory_order_relaxed)) return;
  // Signals belong to the application's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    while (static_cast<int>(workers_.size()) < num_workers) {
      const int worker = static_cast<int>(workers_.size());
      workers_.emplace_back([this, worker] { work(worker); });
    }
  } catch (const std::exception&) {
    max_workers_ = static_cast<int>(workers_.size());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  num_workers_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
}

void ThreadPool::stop() {
  const std::lock_guard lock(mutex_);
  stopping_.store(true);
  published_.fetch_add(1);
  published_.notify_all();
  for (std::thread& worker : workers_) {
    // A task that ends the process gets here on a worker.
    if (worker.get_id() == std::this_thread::get_id()) {
      worker.detach();
    } else {
      worker.join();
    }
  }
  workers_.clear();
  num_workers_.store(0, std::memory_order_relaxed);
}

void ThreadPool::forget_threads() {
  // The handles name threads that are gone: neither join nor detach may touch them.
  for (std::thread& worker : workers_) ::new (static_cast<void*>(&worker)) std::thread;
  workers_.clear();
  num_workers_.store(0);
  spinning_.store(0);
  sleeping_.store(0);
  for (Job& job : jobs_) {  // jobs of the parent's other threads
    job.ticket.store(job.ticket.load() & ~kCountMask);
    job.busy.store(false);
  }
}

// The process's pool. Made by the compiler, so that no call and no fork() can meet it half made,
// and never destroyed, so that destructors of the application's static objects may still call
// run().
union ThreadPool::Process {
  constexpr Process() : pool() {}
  ~Process() {}
  ThreadPool pool;
};
constinit ThreadPool::Process ThreadPool::process;

// Registered when the library is loaded; the workers are joined when it is unloaded or at exit.
const ThreadPool::AtForkAndExit ThreadPool::at_fork_and_exit;

ThreadPool::AtForkAndExit::AtForkAndExit() {
  pthread_atfork([] { process.pool.mutex_.lock(); }, [] { process.pool.mutex_.unlock(); },
                 [] {
                   process.pool.forget_threads();
                   process.pool.mutex_.unlock();
                 });
}

ThreadPool::AtForkAndExit::~AtForkAndExit() { process.pool.stop(); }

ThreadPool& ThreadPool::instance() { return process.pool; }

}  // namespace qkv
