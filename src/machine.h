// SPDX-License-Identifier: Apache-2.0
// Tier: plan. What this machine has: cores that the process may use, caches, names. Called by
// runtime.cpp; the paths are parameters so that tests can lay out their own.
#pragma once
#include <cstdint>
#include <string>

namespace qkv::machine {

/// Cores that this process may use, at least 1: its CPU affinity, capped by its control group's
/// quota.
int usable_cores();

/// CPUs' worth of time that the control groups of a process allow, 0 if there is no limit.
/// membership is the text of /proc/self/cgroup; groups are looked up under root, version 2 and 1,
/// from the process's own group up: the smallest quota counts.
double cgroup_cpus(const std::string& membership, const std::string& root);

struct Caches {
  int64_t l1d_bytes = 0, l2_bytes = 0, l3_bytes = 0;  // 0 if unknown
};
/// Data caches that one core sees; dir holds index0, index1 ... of Linux's sysfs.
Caches caches(const std::string& dir = "/sys/devices/system/cpu/cpu0/cache");

/// Model name of the CPU, "unknown" where the system does not tell.
std::string cpu_name(const std::string& cpuinfo = "/proc/cpuinfo");

/// Name and version of the compiler of the library.
std::string compiler();

}  // namespace qkv::machine
