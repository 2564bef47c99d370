// SPDX-License-Identifier: Apache-2.0
// Tier: command line. The verb table, and the rules that hold for every verb: exit 0 ok, 1 a check
// failed, 2 usage or bad input with one line on stderr (what, where, what to do).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "flags.h"
#include "qkv/error.h"
#include "qkv/qkv.h"
#include "verb.h"

namespace qkv::cli {
namespace {

const Verb* const kVerbs[] = {&kDemo, &kRun, &kInspect, &kPlan, &kBench, &kInfo};

std::string verb_names() {
  std::string names;
  for (const Verb* verb : kVerbs) names += (names.empty() ? "" : ", ") + std::string(verb->name);
  return names;
}

std::string overview() {
  std::string text =
      "qkv: exact attention on CPUs (MHA, MQA, GQA)\n\nUsage: qkv <verb> [--flag "
      "value]\n\nVerbs:\n";
  for (const Verb* verb : kVerbs) text += fmt::format("  {:<9} {}\n", verb->name, verb->help);
  text +=
      "\nqkv <verb> --help explains a verb with an example. Every verb prints plain text, or JSON "
      "with --json.\nExit code: 0 ok, 1 a check failed, 2 usage or bad input (one line on "
      "stderr).\n"
      "\nStart here:\n  qkv demo\n";
  return text;
}

int fail(const std::string& verb, const std::string& text) {
  fmt::print(stderr, "qkv{}{}: {}\n", verb.empty() ? "" : " ", verb, one_line(text));
  return kBadInput;
}

const Verb* find_verb(const std::string& name) {
  for (const Verb* verb : kVerbs) {
    if (name == verb->name) return verb;
  }
  return nullptr;
}

// CLI11 reports a missing required option before an unknown one; the misspelled flag is what the
// user wants to hear of.
void refuse_unknown_flags(const CLI::App& app, const std::vector<std::string>& args) {
  std::vector<std::string> known;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  }
  for (const std::string& arg : args) {
    if (arg == "--") return;
    if (arg.size() < 3 || arg.compare(0, 2, "--") != 0) continue;
    const std::string flag = arg.substr(0, arg.find('='));
    if (app.get_option_no_throw(flag) != nullptr) continue;
    const std::string close = nearest(flag, known);
    throw Error(fmt::format("unknown flag '{}'{}", flag,
                            close.empty() ? "" : fmt::format(", did you mean '{}'?", close)));
  }
}

int run_verb(const Verb& verb, const std::vector<std::string>& args) {
  CLI::App app(verb.help, std::string("qkv ") + verb.name);
  app.get_formatter()->column_width(34);
  const std::function<int()> work = verb.options(app);
  const std::string advice = fmt::format("; 'qkv {} --help' explains the flags", verb.name);
  try {
    refuse_unknown_flags(app, args);
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));  // CLI11 wants them reversed
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return kOk;
  } catch (const CLI::ParseError& e) {
    return fail(verb.name, one_line(e.what()) + advice);
  } catch (const Error& e) {
    return fail(verb.name, e.what() + advice);
  }
  return work();
}

int dispatch(int argc, char** argv) {
  std::vector<std::string> args(argv + std::min(argc, 1), argv + argc);
  if (args.empty()) {
    return fail("",
                fmt::format("a verb is missing ({}); 'qkv --help' explains them", verb_names()));
  }
  const std::string first = args.front();
  args.erase(args.begin());
  if (first == "--version") {
    fmt::print("qkv {}\n", QKV_VERSION);
    return kOk;
  }
  const bool help = first == "--help" || first == "-h" || first == "help";
  if (help && args.empty()) {
    fmt::print("{}", overview());
    return kOk;
  }
  const std::string name = help ? args.front() : first;
  if (help) args.assign(1, "--help");
  if (const Verb* verb = find_verb(name)) return run_verb(*verb, args);

  std::vector<std::string> names;
  for (const Verb* verb : kVerbs) names.emplace_back(verb->name);
  const std::string close = nearest(name, names);
  return fail("", fmt::format("unknown verb '{}'{}; the verbs are {}", name,
                              close.empty() ? "" : fmt::format(", did you mean '{}'?", close),
                              verb_names()));
}

int guarded(int argc, char** argv) {
  const std::string verb = argc > 1 && find_verb(argv[1]) ? argv[1] : "";
  try {
    const int code = dispatch(argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
      return fail(verb, fmt::format("cannot write to standard output: {}", std::strerror(errno)));
    }
    return code;
  } catch (const std::bad_alloc&) {
    return fail(verb, "not enough memory; use smaller sizes or, with run, --no-weights");
  } catch (const std::exception& e) {
    return fail(verb, e.what());
  }
}

}  // namespace
}  // namespace qkv::cli

int main(int argc, char** argv) { return qkv::cli::guarded(argc, argv); }
