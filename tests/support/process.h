// SPDX-License-Identifier: Apache-2.0
// Tier: test. Runs a command and returns what it printed and how it ended.
#pragma once
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace qkv::test {

struct ProcessResult {
  std::string output;  // stdout and stderr
  int exit_code = -1;  // -1: did not start, or ended by a signal
};

inline ProcessResult run_process(const std::string& command) {
  ProcessResult result;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return result;
  char buffer[4096];
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) result.output.append(buffer, n);
  const int status = pclose(pipe);
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  return result;
}

/// The program that is running, quoted for the shell.
inline std::string this_program() {
  char path[4096];
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path);
  std::string quoted = "'";
  quoted.append(path, n > 0 ? static_cast<size_t>(n) : 0);
  return quoted += '\'';
}

}  // namespace qkv::test
