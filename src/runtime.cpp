// SPDX-License-Identifier: Apache-2.0
// Tier: call. Threads and instruction sets of the process: the defaults, and what can be forced.
#include "qkv/runtime.h"

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <string>

#include "isa.h"
#include "machine.h"
#include "qkv/qkv.h"
#include "thread_pool.h"

namespace qkv {
namespace {

std::atomic<int> forced_threads{0};  // 0: not forced
std::atomic<int> usual_threads{0};   // 0: not known yet. No lock: a child after fork() may need it

int threads_from_environment() {
  const char* text = std::getenv("QKV_NUM_THREADS");
  if (text == nullptr || *text == '\0') return machine::usable_cores();
  const std::string_view view(text);
  int n = 0;
  const auto [end, error] = std::from_chars(view.begin(), view.end(), n);
  if (error != std::errc() || end != view.end() || n < 1) {
    throw Error("QKV_NUM_THREADS: expected a number of threads from 1, got \"" + std::string(view) +
                "\"");
  }
  return n;
}

}  // namespace

Executor& default_executor() { return ThreadPool::instance(); }

int default_num_threads() {
  if (const int n = forced_threads.load(std::memory_order_relaxed)) return n;
  if (const int n = usual_threads.load(std::memory_order_relaxed)) return n;
  const int n = threads_from_environment();
  usual_threads.store(n, std::memory_order_relaxed);
  return n;
}

void set_num_threads(int n) {
  if (n < 0) throw Error("set_num_threads: expected 0 or more threads, got " + std::to_string(n));
  forced_threads.store(n, std::memory_order_relaxed);
}

void set_isa(std::string_view isa) { isa::force(isa); }

Info info() {
  const isa::Choice choice = isa::current();
  const machine::Caches caches = machine::caches();
  Info info;
  info.version = QKV_VERSION;
  info.isa = choice.name;
  info.isa_target = choice.target;
  info.isa_reason = choice.reason;
  info.isa_available = isa::available();
  info.cpu = machine::cpu_name();
  info.num_threads = default_num_threads();
  info.l1d_bytes = caches.l1d_bytes;
  info.l2_bytes = caches.l2_bytes;
  info.l3_bytes = caches.l3_bytes;
  info.compiler = machine::compiler();
  return info;
}

}  // namespace qkv
