// SPDX-License-Identifier: Apache-2.0
// qkv bench: what it prints, as text and as JSON, its rows, its time, and how usage errors end. Not
// how fast anything is.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "../bench/cases.h"
#include "support/cli.h"

namespace qkv::test {
namespace {

using Json = nlohmann::json;

CommandResult run_bench(std::vector<std::string> args) {
  args.insert(args.begin(), "bench");
  return run_qkv(args);
}

Json json_of(const std::vector<std::string>& args) {
  const CommandResult result = run_bench(args);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  return Json::parse(result.out);
}

TEST(Bench, ListOfAll_IsTheTable) {
  const Json rows = json_of({"--list", "--filter", ".", "--json"})["rows"];
  const std::set<std::string> names(rows.begin(), rows.end());
  EXPECT_EQ(names.size(), rows.size()) << "two rows have the same name";
  for (const auto& c : bench::kAttentionCases)
    EXPECT_EQ(names.count(std::string("attention/") + c.name), 1U) << c.name;
  for (const auto& c : bench::kBackwardCases)
    EXPECT_EQ(names.count(std::string("backward/") + c.name), 1U) << c.name;
  for (const auto& c : bench::kDecodeCases)
    EXPECT_EQ(names.count(std::string("decode/") + c.name), 1U) << c.name;
  for (const auto& c : bench::kLinearCases)
    EXPECT_EQ(names.count(std::string("layer/") + c.name), 1U) << c.name;
  for (const auto& c : bench::kLayerCases)
    EXPECT_EQ(names.count(std::string("layer/") + c.name), 1U) << c.name;
}

TEST(Bench, ListWithoutFilter_IsTheSummary) {
  const CommandResult result = run_bench({"--list"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  std::set<std::string> names;
  for (size_t begin = 0, end; (end = result.out.find('\n', begin)) != std::string::npos;
       begin = end + 1) {
    names.insert(result.out.substr(begin, end - begin));
  }
  const std::set<std::string> summary(std::begin(bench::kSummary), std::end(bench::kSummary));
  EXPECT_EQ(names, summary);
}

TEST(Bench, Json_RowsAndRoofsOfTheSameRun) {
  const Json json = json_of({"--filter", "attention/lesson-b10-h8-d16|layer/lesson-mqa$",
                             "--seconds", "60", "--num-threads", "1", "--json"});
  for (const char* key : {"version", "isa", "isa_target", "cpu", "compiler"})
    EXPECT_TRUE(json.at(key).is_string()) << key;
  EXPECT_EQ(json["num_threads"], 1);
  EXPECT_TRUE(json["left_out"].empty());
  ASSERT_EQ(json["roofs"].size(), 2U);
  EXPECT_EQ(json["roofs"][0]["kind"], "fma");
  EXPECT_EQ(json["roofs"][0]["unit"], "GFLOP/s");
  EXPECT_EQ(json["roofs"][1]["kind"], "read");
  EXPECT_EQ(json["roofs"][1]["unit"], "GB/s");
  for (const Json& roof : json["roofs"]) {
    EXPECT_EQ(roof["num_threads"], 1);
    EXPECT_GT(roof["median"], 0);
    EXPECT_GE(roof["best"], roof["median"]);
  }
  ASSERT_EQ(json["rows"].size(), 2U);
  EXPECT_EQ(json["rows"][0]["name"], "attention/lesson-b10-h8-d16");
  EXPECT_EQ(json["rows"][1]["name"], "layer/lesson-mqa");
  for (const Json& row : json["rows"]) {
    EXPECT_EQ(row["is_correct"], true);
    EXPECT_LT(row["error"], 1e-4);
    EXPECT_EQ(row["roof_kind"], "fma");
    EXPECT_EQ(row["num_threads"], 1);
    EXPECT_GE(row["num_samples"], 3);
    EXPECT_GT(row["best_us"], 0);
    EXPECT_GE(row["median_us"], row["best_us"]);
    EXPECT_NEAR(row["best"].get<double>(), row["rate"].get<double>() / row["roof"].get<double>(),
                1e-12);
    EXPECT_GT(row["median"], 0);
  }
}

TEST(Bench, Text_NamesMachineRowsAndRoofs) {
  const CommandResult result =
      run_bench({"--filter", "lesson-b10-h8-d16", "--seconds", "1", "--num-threads", "1"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  for (const char* part : {"of roof", "\nattention/lesson-b10-h8-d16 ", "GFLOP/s", "Roofs",
                           "fused multiply-add", "of memory", "1 thread "}) {
    EXPECT_NE(result.out.find(part), std::string::npos) << part << " in:\n" << result.out;
  }
  EXPECT_EQ(result.out.find("left out"), std::string::npos) << result.out;
}

TEST(Bench, TwoThreads_RoofsOfOneAndOfTwo) {
  const Json json =
      json_of({"--filter", "lesson-b10-h8-d16", "--seconds", "1", "--threads", "2", "--json"});
  std::set<std::pair<std::string, int>> roofs;
  for (const Json& roof : json["roofs"]) roofs.emplace(roof["kind"], roof["num_threads"]);
  EXPECT_EQ(roofs, (std::set<std::pair<std::string, int>>{
                       {"fma", 1}, {"fma", 2}, {"read", 1}, {"read", 2}}));
  EXPECT_EQ(json["rows"][0]["num_threads"], 2);
}

TEST(Bench, TimeSpent_NamesTheRowsLeftOut) {
  const std::vector<std::string> args = {"--filter", "attention/lesson", "--seconds",
                                         "0.001",    "--num-threads",    "1"};
  std::vector<std::string> json_args = args;
  json_args.emplace_back("--json");
  const Json json = json_of(json_args);
  ASSERT_EQ(json["rows"].size(), 1U);
  EXPECT_EQ(json["rows"][0]["num_samples"], 3);
  EXPECT_EQ(json["left_out"], Json({"attention/lesson-b10-h8-d64"}));
  const CommandResult text = run_bench(args);
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_NE(text.out.find("1 row left out"), std::string::npos) << text.out;
}

TEST(Bench, BadArguments_AreRefused) {
  for (const char* seconds : {"0", "-1", "nan", "inf", "5s", "", "many", "1e999"})
    expect_refused(run_bench({std::string("--seconds=") + seconds}), {"--seconds"});
  expect_refused(run_bench({"--filter", "("}), {"--filter", "'('", "regular expression"});
  expect_refused(run_bench({"--filter", "no-such-row"}), {"no-such-row", "--list"});
  expect_refused(run_bench({"--num-threads", "0"}), {"--num-threads"});
  expect_refused(run_bench({"--num-threads", "100000"}), {"--num-threads", "100000"});
  expect_refused(run_bench({"--fliter", "x"}), {"did you mean '--filter'?"});
  expect_refused(run_bench({"attention"}), {"attention", "qkv bench --help"});
}

}  // namespace
}  // namespace qkv::test
