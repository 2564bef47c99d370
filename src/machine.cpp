// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Reads affinity, control groups, sysfs and procfs. Everything that cannot be read is
// "no limit" or "unknown": a missing file is never an error.
#include "machine.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

namespace qkv::machine {
namespace {

std::string first_line(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

int affinity_cores() {
#ifdef __linux__
  // The kernel refuses a mask that is shorter than its own: grow until it fits.
  for (size_t n = 1024; n <= (size_t{1} << 20); n *= 2) {
    cpu_set_t* set = CPU_ALLOC(n);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(n);
    const bool ok = sched_getaffinity(0, bytes, set) == 0;
    const int count = ok ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (ok) return std::max(1, count);
  }
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// CPUs' worth of time of one group, 0 if it sets no limit.
double quota_of(const std::string& dir, bool v2) {
  double quota = 0, period = 0;
  if (v2) {
    std::istringstream line(first_line(dir + "/cpu.max"));  // "max 100000" or "150000 100000"
    if (!(line >> quota >> period)) return 0;
  } else {
    std::istringstream(first_line(dir + "/cpu.cfs_quota_us")) >> quota;  // -1: none
    std::istringstream(first_line(dir + "/cpu.cfs_period_us")) >> period;
  }
  return quota > 0 && period > 0 ? quota / period : 0;
}

bool has_word(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

int64_t parse_bytes(const std::string& text) {  // "48K", "32M"
  int64_t n = 0;
  char unit = 0;
  std::istringstream stream(text);
  stream >> n >> unit;
  return n * (unit == 'K' ? 1024 : unit == 'M' ? 1024 * 1024 : unit == 'G' ? 1 << 30 : 1);
}

int64_t sysconf_bytes(int name) { return std::max<int64_t>(0, sysconf(name)); }

}  // namespace

double cgroup_cpus(const std::string& membership, const std::string& root) {
  double smallest = 0;
  std::istringstream lines(membership);
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');  // hierarchy:controllers:group
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && !has_word(controllers, "cpu")) continue;
    std::string group = line.substr(second + 1);
    for (;;) {  // the group and its parents; a container may see its own group as the root
      for (const std::string& top : v2 ? std::vector<std::string>{"", "/unified"}
                                       : std::vector<std::string>{"/" + controllers, "/cpu"}) {
        const double cpus = quota_of(root + top + group, v2);
        if (cpus > 0 && (smallest == 0 || cpus < smallest)) smallest = cpus;
      }
      if (group.empty()) break;
      const size_t slash = group.rfind('/');
      group.resize(slash == std::string::npos ? 0 : slash);
    }
  }
  return smallest;
}

int usable_cores() {
  std::ifstream file("/proc/self/cgroup");
  const std::string membership((std::istreambuf_iterator<char>(file)), {});
  const double quota = cgroup_cpus(membership, "/sys/fs/cgroup");
  const int cores = affinity_cores();
  return quota > 0 && quota < cores ? static_cast<int>(std::ceil(quota)) : cores;
}

Caches caches(const std::string& dir) {
  Caches caches;
  for (int i = 0;; i++) {
    const std::string index = dir + "/index" + std::to_string(i) + "/";
    const std::string level = first_line(index + "level");
    if (level.empty()) break;
    if (first_line(index + "type") == "Instruction") continue;
    const int64_t bytes = parse_bytes(first_line(index + "size"));
    if (level == "1") caches.l1d_bytes = bytes;
    if (level == "2") caches.l2_bytes = bytes;
    if (level == "3") caches.l3_bytes = bytes;
  }
#ifdef _SC_LEVEL1_DCACHE_SIZE
  if (caches.l1d_bytes == 0) {
    caches = {sysconf_bytes(_SC_LEVEL1_DCACHE_SIZE), sysconf_bytes(_SC_LEVEL2_CACHE_SIZE),
              sysconf_bytes(_SC_LEVEL3_CACHE_SIZE)};
  }
#endif
  return caches;
}

std::string cpu_name(const std::string& cpuinfo) {
  std::ifstream file(cpuinfo);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(':');
    const size_t begin =
        colon == std::string::npos ? colon : line.find_first_not_of(" \t", colon + 1);
    if (begin != std::string::npos) return line.substr(begin);
  }
  return "unknown";
}

std::string compiler() {
#if defined(__clang__)
  const char* name = "clang ";
  const int version[] = {__clang_major__, __clang_minor__, __clang_patchlevel__};
#elif defined(__GNUC__)
  const char* name = "gcc ";
  const int version[] = {__GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__};
#else
  const char* name = "unknown ";
  const int version[] = {0, 0, 0};
#endif
  return name + std::to_string(version[0]) + "." + std::to_string(version[1]) + "." +
         std::to_string(version[2]);
}

}  // namespace qkv::machine
