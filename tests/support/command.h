// SPDX-License-Identifier: Apache-2.0
// Tier: test. Runs a program without a shell and returns what it printed and how it ended.
#pragma once
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/files.h"

namespace qkv::test {

struct CommandResult {
  int exit_code = -1;  // 128 + signal if a signal ended it
  std::string out, err;
};

struct CommandSetting {
  int64_t most_file_bytes = -1;  // a write beyond it fails, as on a full disk; -1: no limit
  std::string out_path{};        // stdout goes there instead of into the result
};

inline CommandResult run_command(const std::vector<std::string>& args,
                                 const CommandSetting& setting = {}) {
  const TemporaryFolder folder;
  const std::string out_path = setting.out_path.empty() ? folder / "out" : setting.out_path;
  const std::string err_path = folder / "err";
  std::vector<char*> argv;
  for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    if (freopen(out_path.c_str(), "w", stdout) == nullptr ||
        freopen(err_path.c_str(), "w", stderr) == nullptr) {
      _exit(126);
    }
    if (setting.most_file_bytes >= 0) {
      const rlimit limit{static_cast<rlim_t>(setting.most_file_bytes),
                         static_cast<rlim_t>(setting.most_file_bytes)};
      setrlimit(RLIMIT_FSIZE, &limit);
      signal(SIGXFSZ, SIG_IGN);  // stays ignored over exec: the write returns an error
    }
    execv(argv[0], argv.data());
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CommandResult result;
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (setting.out_path.empty()) result.out = read_bytes(out_path);
  result.err = read_bytes(err_path);
  return result;
}

}  // namespace qkv::test
