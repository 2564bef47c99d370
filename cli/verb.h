// SPDX-License-Identifier: Apache-2.0
// Tier: command line. What a verb is. Each verb file defines one of these; main.cpp lists them.
#pragma once
#include <functional>

namespace CLI {
class App;
}  // namespace CLI

namespace qkv::cli {

/// Exit codes of every verb.
inline constexpr int kOk = 0;
inline constexpr int kCheckFailed = 1;
inline constexpr int kBadInput = 2;

struct Verb {
  const char* name;
  const char* help;  // one line
  /// Adds the options to app, and as its footer what --help teaches, with an example. The function
  /// returned does the work once the options are parsed and gives the exit code.
  std::function<int()> (*options)(CLI::App& app);
};

extern const Verb kDemo;
extern const Verb kRun;
extern const Verb kInspect;
extern const Verb kPlan;
extern const Verb kBench;
extern const Verb kInfo;

}  // namespace qkv::cli
