// SPDX-License-Identifier: Apache-2.0
// Tier: call. Threads and instruction sets.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/error.h"

namespace qkv {

/// Runs independent tasks. The library has its own small pool; a caller with OpenMP, TBB or a server's pool passes an
/// object of this type in AttentionOptions::executor.
class QKV_EXPORT Executor {
 public:
  virtual ~Executor() = default;
  /// Calls task(context, index) exactly once for every index in [0, num_tasks), on at most num_threads threads at a time,
  /// and returns when all calls have returned. Tasks do not throw and do not depend on each other. Results never depend on
  /// which thread runs which task.
  virtual void run(int64_t num_tasks, int num_threads, void (*task)(void* context, int64_t index),
                   void* context) = 0;
};

/// The library's own pool: threads start at the first call that needs them, spin for a few microseconds after work and
/// then sleep. Safe to call from several threads at once and from inside a task (it then runs inline).
QKV_EXPORT Executor& default_executor();

/// Threads used when num_threads is 0: the environment variable QKV_NUM_THREADS, else the cores this process may use.
QKV_EXPORT int default_num_threads();
/// 0 restores the default; negative is refused.
QKV_EXPORT void set_num_threads(int n);

/// Forces an instruction set for the whole process: "auto", "baseline", "sse4", "avx2", "avx512", "neon". Throws Error if
/// this machine cannot run it. The environment variable QKV_ISA does the same at the first call. Not for use during calls.
QKV_EXPORT void set_isa(std::string_view isa);

struct Info {
  std::string version;
  std::string isa;         ///< "avx512", "avx2", "sse4", "neon", "baseline" ...
  std::string isa_target;  ///< Highway's own name of the target
  std::string isa_reason;  ///< "detected", "QKV_ISA", "set_isa"
  std::vector<std::string> isa_available;
  std::string cpu;
  int num_threads = 0;
  int64_t l1d_bytes = 0, l2_bytes = 0, l3_bytes = 0;
  std::string compiler;
};
QKV_EXPORT Info info();

}  // namespace qkv
