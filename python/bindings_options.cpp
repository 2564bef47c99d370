// SPDX-License-Identifier: Apache-2.0
// Tier: call. Options of a call from Python values, and calls that release the GIL.
#include <atomic>
#include <chrono>
#include <exception>

#include "bindings_args.h"
#include "bindings_mask.h"
#include "qkv/runtime.h"

namespace qkv::python {
namespace {

// Work below this is over before a person can react; it runs without the listening executor.
constexpr double kInterruptibleFlop = 1e9;
// How often the main thread takes the GIL to look for signals: rare enough that a busy
// interpreter in another thread does not slow the kernels.
constexpr std::chrono::milliseconds kPollEvery{100};

// Signal handlers of Python run in its main thread only.
bool is_main_thread() {
  static const unsigned long main_thread = [] {
    const Ref threading(PyImport_ImportModule("threading"));
    const Ref thread(threading ? PyObject_CallMethod(threading.get(), "main_thread", nullptr)
                               : nullptr);
    const Ref ident(thread ? PyObject_GetAttrString(thread.get(), "ident") : nullptr);
    const unsigned long id = ident ? PyLong_AsUnsignedLong(ident.get()) : 0;
    PyErr_Clear();
    return id;
  }();
  return PyThread_get_thread_ident() == main_thread;
}

// Runs tasks on the library's pool; the calling thread looks for signals between its tasks, and
// after one the tasks that have not started are skipped.
class InterruptibleExecutor : public Executor {
 public:
  explicit InterruptibleExecutor(PyThreadState** state)
      : state_(state), next_poll_(Clock::now() + kPollEvery) {}

  void run(int64_t num_tasks, int num_threads, void (*task)(void*, int64_t),
           void* context) override {
    task_ = task, context_ = context, caller_ = PyThread_get_thread_ident();
    default_executor().run(num_tasks, num_threads, &InterruptibleExecutor::run_task, this);
  }
  bool is_interrupted() const { return is_interrupted_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;

  static void run_task(void* self, int64_t index) {
    auto& e = *static_cast<InterruptibleExecutor*>(self);
    if (e.is_interrupted()) return;
    e.task_(e.context_, index);
    if (PyThread_get_thread_ident() == e.caller_ && Clock::now() >= e.next_poll_) e.poll();
  }
  void poll() {
    PyEval_RestoreThread(*state_);
    if (PyErr_CheckSignals() != 0) is_interrupted_.store(true, std::memory_order_relaxed);
    *state_ = PyEval_SaveThread();
    next_poll_ = Clock::now() + kPollEvery;
  }

  PyThreadState** state_;
  Clock::time_point next_poll_;
  void (*task_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  unsigned long caller_ = 0;
  std::atomic<bool> is_interrupted_{false};
};

int64_t g_repeats = 1;

}  // namespace

void set_repeats(int64_t n) { g_repeats = n; }

int64_t to_int(PyObject* value, int64_t fallback) {
  if (!value) return fallback;
  const Ref number = Ref::checked(PyNumber_Index(value));
  const long long x = PyLong_AsLongLong(number.get());
  if (x == -1 && PyErr_Occurred()) throw PythonError();
  return x;
}

OptionArguments::OptionArguments(const Values& v, const char* caller) {
  if (v.mask) {
    if (const PyMask* mask = as_mask(v.mask)) {
      options.mask = mask->mask;
    } else {
      open_mask_array(&mask_, v.mask, caller);
      options.mask = Mask::dense(mask_.view());
    }
  }
  if (v.bias) {
    bias_.open(v.bias, caller, "bias");
    bias_rank_ = bias_.view().rank;
    bias_.raise_rank(2);
    options.bias = bias_.view();
  }
  if (v.sinks) {
    sinks_.open(v.sinks, caller, "sinks");
    options.sinks = sinks_.view();
  }
  if (v.alibi_slopes) {
    alibi_slopes_.open(v.alibi_slopes, caller, "alibi_slopes");
    options.alibi_slopes = alibi_slopes_.view();
  }
  if (v.scale) options.scale = to_double(v.scale, 0);
  options.softcap = to_double(v.softcap, 0);
  options.dropout = to_double(v.dropout, 0);
  if (v.seed) {
    const Ref number = Ref::checked(PyNumber_Index(v.seed));
    options.seed = PyLong_AsUnsignedLongLong(number.get());
    if (PyErr_Occurred()) throw PythonError();
  }
  const int64_t threads = to_int(v.num_threads, 0);
  if (threads < 0 || threads > INT32_MAX) {
    throw Error(std::string(caller) + ": num_threads must not be negative, got " +
                std::to_string(threads));
  }
  options.num_threads = static_cast<int>(threads);
}

void run_released(double flop, Executor** executor, void (*work)(void*), void* context) {
  const bool listens = flop >= kInterruptibleFlop && is_main_thread();
  PyThreadState* state = PyEval_SaveThread();
  InterruptibleExecutor listening(&state);
  if (listens && executor) *executor = &listening;
  std::exception_ptr failure;
  try {
    for (int64_t i = g_repeats; i > 0; --i) work(context);
  } catch (...) {
    failure = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (failure) std::rethrow_exception(failure);
  if (listening.is_interrupted()) throw PythonError();
}

}  // namespace qkv::python
