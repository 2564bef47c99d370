// SPDX-License-Identifier: Apache-2.0
// Tier: command line. qkv info: what this build does on this machine.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "output.h"
#include "qkv/runtime.h"
#include "verb.h"

namespace qkv::cli {
namespace {

int print_info(bool json) {
  const Info i = qkv::info();
  if (json) {
    print_json({{"version", i.version},
                {"isa", i.isa},
                {"isa_target", i.isa_target},
                {"isa_reason", i.isa_reason},
                {"isa_available", i.isa_available},
                {"cpu", i.cpu},
                {"num_threads", i.num_threads},
                {"l1d_bytes", i.l1d_bytes},
                {"l2_bytes", i.l2_bytes},
                {"l3_bytes", i.l3_bytes},
                {"compiler", i.compiler}});
    return kOk;
  }
  const auto cache = [](int64_t bytes) {
    return bytes > 0 ? fmt::format("{} KiB", bytes / 1024) : std::string("unknown");
  };
  fmt::print("version    {}, built with {}\n", i.version, i.compiler);
  fmt::print("isa        {} ({}), {}\n", i.isa, i.isa_target, i.isa_reason);
  fmt::print("available  {}\n", fmt::join(i.isa_available, " "));
  fmt::print("cpu        {}\n", i.cpu);
  fmt::print("threads    {}\n", i.num_threads);
  fmt::print("caches     L1d {}, L2 {}, L3 {}\n", cache(i.l1d_bytes), cache(i.l2_bytes),
             cache(i.l3_bytes));
  return kOk;
}

}  // namespace

const Verb kInfo = {"info", "version, instruction set and how it was chosen, threads, caches",
                    [](CLI::App& app) -> std::function<int()> {
                      const auto json = std::make_shared<bool>(false);
                      app.add_flag("--json", *json, "print JSON");
                      app.footer(
                          "\nThe instruction set is the best this machine has, unless the "
                          "environment variable QKV_ISA\n"
                          "names another (baseline, avx2, avx512, neon). QKV_NUM_THREADS sets the "
                          "number of threads;\n"
                          "results have the same bits for any number.\n\n"
                          "Example:\n  QKV_ISA=avx2 qkv info\n");
                      return [json] { return print_info(*json); };
                    }};

}  // namespace qkv::cli
