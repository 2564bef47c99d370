// SPDX-License-Identifier: Apache-2.0
// The verbs of the command line, but run (cli_run_test.cpp): what they print, as text and as JSON,
// and how usage errors end.
#include "support/cli.h"

#include <gtest/gtest.h>

#include "qkv/qkv.h"

namespace qkv::test {
namespace {

using Json = nlohmann::json;
const std::string kData = QKV_SOURCE_DIR "/tests/data/layers/";

Json json_of(const std::vector<std::string>& args) {
  const CommandResult result = run_qkv(args);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  return Json::parse(result.out);
}

std::string text_of(const std::vector<std::string>& args) {
  const CommandResult result = run_qkv(args);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  return result.out;
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in:\n" << text;
}

// The lines of text that hold a part.
std::vector<std::string> lines_with(const std::string& text, const std::string& part) {
  std::vector<std::string> lines;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    if (line.find(part) != std::string::npos) lines.push_back(line);
    begin = end + 1;
  }
  return lines;
}

const std::vector<std::string> kVerbs = {"demo", "run", "inspect", "plan", "bench", "info"};

TEST(Cli, Help_NamesEveryVerb) {
  for (const char* flag : {"--help", "-h", "help"}) {
    const std::string text = text_of({flag});
    for (const std::string& verb : kVerbs) expect_contains(text, "\n  " + verb + " ");
    expect_contains(text, "Exit code");
  }
}

TEST(Cli, HelpOfEveryVerb_TeachesWithAnExample) {
  for (const std::string& verb : kVerbs) {
    const std::string text = text_of({verb, "--help"});
    expect_contains(text, "Example:");
    expect_contains(text, "qkv " + verb);
    expect_contains(text, "--json");
    EXPECT_EQ(text_of({"help", verb}), text);
    EXPECT_EQ(text_of({verb, "-h"}), text);
  }
  for (const char* mask : {"causal-top-left", "causal-bottom-right", "window:L,R", "prefix:N",
                           "chunk:N", "lengths:"}) {
    expect_contains(text_of({"run", "--help"}), mask);
  }
}

TEST(Cli, Version_IsTheLibrarys) { EXPECT_EQ(text_of({"--version"}), "qkv " QKV_VERSION "\n"); }

TEST(Cli, UsageErrors_OneLineWithAdvice) {
  expect_refused(run_qkv({}), {"verb is missing", "demo", "--help"});
  expect_refused(run_qkv({"rnu"}), {"unknown verb 'rnu'", "did you mean 'run'?"});
  expect_refused(run_qkv({"qqqqqqqq"}), {"unknown verb", "demo, run, inspect, plan, bench, info"});
  expect_refused(run_qkv({"help", "rum"}), {"did you mean 'run'?"});
  expect_refused(run_qkv({"run", "--wieghts", "w"}),
                 {"unknown flag '--wieghts'", "did you mean '--weights'?"});
  expect_refused(run_qkv({"run", "--input=x", "--qqqqqqqqqq=1"}),
                 {"unknown flag '--qqqqqqqqqq'", "qkv run --help"});
  expect_refused(run_qkv({"run", "--input", "x"}), {"--weights", "required", "qkv run --help"});
  expect_refused(run_qkv({"run", "--weights"}), {"--weights", "qkv run --help"});
  expect_refused(run_qkv({"demo", "more"}), {"more", "qkv demo --help"});
  expect_refused(run_qkv({"info", "-x"}), {"-x", "qkv info --help"});
  expect_refused(run_qkv({"inspect"}), {"file", "required"});
  expect_refused(run_qkv({"two\nlines"}), {"two?lines"});
}

TEST(Cli, Sizes_OnlyWholeNumbers) {
  for (const char* text :
       {"nan", "NaN", "8.5", "-8", "0", "", "8heads", "1e3", "0x8", "inf", " 8", "+8"}) {
    expect_refused(run_qkv({"plan", std::string("--num-heads=") + text}), {"--num-heads"});
  }
  expect_refused(run_qkv({"plan", "--num-heads", "99999999999999999999"}), {"64 bits"});
  EXPECT_EQ(json_of({"plan", "--num-heads", "010", "--json"})["columns"][0]["num_heads"],
            10);  // not octal
}

TEST(Cli, FullStandardOutput_IsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "this system has no /dev/full";
  const CommandResult result = run_qkv({"demo"}, {.out_path = "/dev/full"});
  expect_refused(result, {"standard output"});
}

TEST(Demo, PrintsShapesAndParametersOfTheLesson) {
  const std::string text = text_of({"demo"});
  const auto lines = lines_with(text, "[80, 2, 4] [10, 2, 8]");
  ASSERT_EQ(lines.size(), 2U);
  expect_contains(lines[0], "MHA");
  expect_contains(lines[1], "MQA");
  expect_contains(text, "MHA  128*128+128 + 128*128+128 + 64*128+128 + 128*8+8 = 42376\n");
  expect_contains(text, "MQA  128*128+128 + 128*16+16 + 64*16+16 + 128*8+8 = 20648\n");
  EXPECT_EQ(text.find("nan"), std::string::npos) << text;
  expect_contains(text, "sees no key");
}

TEST(Demo, EmptyRowShowsTheBias) {
  const std::string text = text_of({"demo"});
  // The numbers of the line "output ... row 0" are those of the line fc_o.bias below it.
  const auto outputs = lines_with(text, "output             row 0");
  const auto biases = lines_with(text, "fc_o.bias         ");
  ASSERT_EQ(outputs.size(), 2U);
  ASSERT_EQ(biases.size(), 2U);
  for (size_t m = 0; m < 2; ++m) {
    const std::string numbers = outputs[m].substr(outputs[m].find("row 0") + 5);
    EXPECT_GT(numbers.size(), 40U);
    EXPECT_EQ(biases[m].substr(biases[m].size() - numbers.size()), numbers);
  }
  EXPECT_EQ(lines_with(text, "row 0   0.0000  0.0000  0.0000  0.0000").size(), 2U) << text;
  EXPECT_EQ(lines_with(text, "row 1   1.0000  0.0000  0.0000  0.0000").size(), 2U) << text;
}

TEST(Demo, Json) {
  const Json json = json_of({"demo", "--json"});
  EXPECT_EQ(json["ok"], true);
  ASSERT_EQ(json["modules"].size(), 2U);
  EXPECT_EQ(json["modules"][0]["num_parameters"], 42376);
  EXPECT_EQ(json["modules"][1]["num_parameters"], 20648);
  EXPECT_EQ(json["modules"][0]["kv_bytes_per_token"], 1024);
  EXPECT_EQ(json["modules"][1]["kv_bytes_per_token"], 128);
  for (const Json& module : json["modules"]) {
    EXPECT_EQ(module["attention"], Json({80, 2, 4}));
    EXPECT_EQ(module["output"], Json({10, 2, 8}));
    EXPECT_EQ(module["row_0_is_bias"], true);
  }
}

TEST(Info, JsonAndText) {
  const Json json = json_of({"info", "--json"});
  EXPECT_EQ(json["version"], QKV_VERSION);
  EXPECT_GE(json["num_threads"], 1);
  const std::string isa = json["isa"];
  EXPECT_NE(std::find(json["isa_available"].begin(), json["isa_available"].end(), isa),
            json["isa_available"].end());
  const std::string text = text_of({"info"});
  for (const char* label : {"version ", "isa ", "available ", "cpu ", "threads ", "caches "})
    expect_contains(text, label);
  expect_contains(text, isa);
}

TEST(Plan, ThreeKindsSideBySide) {
  const std::vector<std::string> args = {
      "plan", "--batch", "2",    "--num-heads",   "32",  "--num-kv-heads", "8",   "--n-q",
      "1",    "--n-kv",  "8192", "--head-dim-qk", "128", "--dtype-kv",     "bf16"};
  std::vector<std::string> json_args = args;
  json_args.emplace_back("--json");
  const Json json = json_of(json_args);
  ASSERT_EQ(json["columns"].size(), 3U);
  const int64_t kv_heads[] = {32, 8, 1};
  const char* kinds[] = {"MHA", "GQA", "MQA"};
  for (size_t c = 0; c < 3; ++c) {
    const Json& column = json["columns"][c];
    const int64_t per_token = kv_heads[c] * (128 + 128) * 2;
    const int64_t dim = 32 * 128;
    EXPECT_EQ(column["kind"], kinds[c]);
    EXPECT_EQ(column["num_kv_heads"], kv_heads[c]);
    EXPECT_EQ(column["kv_bytes_per_token"], per_token);
    EXPECT_EQ(column["kv_cache_bytes"], per_token * 2 * 8192);
    EXPECT_EQ(column["num_parameters"], 2 * (dim * dim + dim) + 2 * (dim + 1) * kv_heads[c] * 128);
    EXPECT_EQ(column["flop"], int64_t{2} * 2 * 32 * 8192 * (128 + 128));
    EXPECT_EQ(column["visible_pairs"], 2 * 32 * 8192);
    EXPECT_GT(column["expected_seconds"], 0);
    EXPECT_NE(column["path"], "");
    EXPECT_NE(column["reason"], "");
  }
  const std::string text = text_of(args);
  expect_contains(lines_with(text, "num_kv_heads").at(0), "32");
  expect_contains(text, "KV cache, bytes per token");
  expect_contains(text, "MHA");
  expect_contains(text, "GQA");
  expect_contains(text, "MQA");
}

TEST(Plan, MaskHalvesTheWork) {
  const auto pairs = [](const char* mask) {
    return json_of({"plan", "--num-heads", "1", "--n-q", "100", "--mask", mask,
                    "--json"})["columns"][0]["visible_pairs"];
  };
  EXPECT_EQ(pairs("full"), 10000);
  EXPECT_EQ(pairs("causal-top-left"), 5050);
  EXPECT_EQ(pairs("causal-bottom-right"), 5050);
  EXPECT_EQ(pairs("window:0,0"), 100);
  EXPECT_EQ(pairs("window:none,0"), 5050);
  EXPECT_EQ(pairs("window:1,1"), 298);
  EXPECT_EQ(pairs("chunk:10"), 1000);
  EXPECT_EQ(pairs("prefix:100"), 10000);
  EXPECT_EQ(pairs("lengths:7"), 700);
  EXPECT_EQ(pairs("causal-top-left&chunk:10"), 550);
  EXPECT_EQ(pairs(" causal-top-left & chunk:10 "), 550);
  EXPECT_EQ(json_of({"plan", "--num-heads", "1", "--n-q", "3", "--n-kv", "4", "--mask",
                     "documents:1,1,2/1,2,2,2", "--json"})["columns"][0]["visible_pairs"],
            1 + 1 + 3);
  EXPECT_EQ(json_of({"plan", "--num-heads", "1", "--n-q", "100", "--mask", "chunk:10", "--mask",
                     "causal-top-left", "--json"})["columns"][0]["visible_pairs"],
            550);
}

TEST(Plan, BadMasksAndSizes_AreRefused) {
  const auto refused = [](const std::string& mask, const std::vector<std::string>& words) {
    expect_refused(run_qkv({"plan", "--mask=" + mask}), words);
  };
  refused("causal", {"two meanings", "causal-top-left", "causal-bottom-right"});
  refused("causal_top_left", {"did you mean 'causal-top-left'?"});
  refused("nothing-like-it-at-all", {"unknown mask", "window:L,R"});
  refused("", {"--mask"});
  refused("window", {"window:L,R"});
  refused("window:3", {"left,right"});
  refused("window:3,4,up", {"left,right"});
  refused("window:-2,0", {"window", "'-2'"});
  refused("prefix:nan", {"prefix", "'nan'"});
  refused("prefix:", {"prefix"});
  refused("chunk:0", {"chunk", "'0'"});
  refused("full:1", {"full"});
  refused("lengths:3,x", {"lengths", "'x'"});
  refused("lengths:1,2,3", {"lengths"});            // the batch has one entry
  refused("lengths:513", {"513"});                  // longer than n_kv
  refused("documents:1,2,3/1,2,3", {"documents"});  // not n_q, n_kv ids
  refused("documents:1/2/3", {"documents"});
  refused("full&", {"unknown mask"});
  expect_refused(run_qkv({"plan", "--num-heads", "12", "--num-kv-heads", "8"}), {"12", "8"});
  expect_refused(run_qkv({"plan", "--dtype", "f31"}), {"--dtype", "'f31'", "bf16"});
  expect_refused(run_qkv({"plan", "--n-q", "4611686018427387904"}), {"plan"});
  expect_refused(run_qkv({"plan", "--num-threads", "100000"}), {"--num-threads"});
}

TEST(Inspect, LayerOfTheLesson) {
  const Json json = json_of({"inspect", kData + "seed_mqa/weights.safetensors", "--json"});
  EXPECT_EQ(json["format"], "safetensors");
  EXPECT_EQ(json["metadata"]["num_heads"], "8");
  EXPECT_EQ(json["tensors"].size(), 8U);
  EXPECT_EQ(json["layers"].at(0)["naming"], "lesson");
  EXPECT_EQ(json["layers"].at(0)["num_heads"], 8);
  EXPECT_EQ(json["layers"].at(0)["num_kv_heads"], 1);
  EXPECT_EQ(json["layers"].at(0)["head_dim_qk"], 16);
  EXPECT_EQ(json["layers"].at(0)["dim_v"], 64);
  EXPECT_EQ(json["layers"].at(0)["num_parameters"], 20648);
  const std::string text = text_of({"inspect", kData + "seed_mqa/weights.safetensors"});
  expect_contains(text, "lesson naming");
  expect_contains(lines_with(text, "fc_v.weight").at(0), "[16, 64]");
}

TEST(Inspect, StatisticsCountNanAndInf) {
  const TemporaryFolder folder;
  const std::vector<float> values = {1, -2, NAN, 4, -INFINITY, 3};
  const std::vector<int32_t> ids = {7, -3};
  save_safetensors(folder / "x.safetensors", {{"x", ConstTensor(values.data(), {2, 3})},
                                              {"ids", ConstTensor(ids.data(), {2})},
                                              {"none", ConstTensor(values.data(), {0, 3})}});
  const Json json = json_of({"inspect", folder / "x.safetensors", "--json"});
  EXPECT_TRUE(json["layers"].empty());
  std::map<std::string, Json> rows;
  for (const Json& row : json["tensors"]) rows[row["name"]] = row;
  EXPECT_EQ(rows["x"]["nan_count"], 1);
  EXPECT_EQ(rows["x"]["min"], "-inf");
  EXPECT_EQ(rows["x"]["max"], 4);
  EXPECT_EQ(rows["x"]["mean"], "-inf");
  EXPECT_EQ(rows["ids"]["dtype"], "i32");
  EXPECT_EQ(rows["ids"]["min"], -3);
  EXPECT_EQ(rows["ids"]["max"], 7);
  EXPECT_EQ(rows["ids"]["mean"], 2);
  EXPECT_EQ(rows["none"]["shape"], Json({0, 3}));
  EXPECT_EQ(rows["none"]["max"], nullptr);
  EXPECT_FALSE(json_of({"inspect", folder / "x.safetensors", "--json", "--no-values"})["tensors"][0]
                   .contains("min"));
}

TEST(Inspect, LayerWithoutNumHeads_SaysWhatIsMissing) {
  const TemporaryFolder folder;
  const std::vector<float> w(24 * 8);
  std::vector<NamedTensor> tensors;
  for (const char* name : {"fc_q.weight", "fc_k.weight", "fc_v.weight"}) {
    tensors.push_back({name, ConstTensor(w.data(), {24, 8})});
  }
  tensors.push_back({"fc_o.weight", ConstTensor(w.data(), {8, 24})});
  save_safetensors(folder / "w.safetensors", tensors);
  const Json json = json_of({"inspect", folder / "w.safetensors", "--json"});
  EXPECT_EQ(json["layers"].at(0)["naming"], "lesson");
  EXPECT_NE(json["layers"].at(0)["reason"].get<std::string>().find("num_heads"), std::string::npos);
  const Json known = json_of({"inspect", folder / "w.safetensors", "--num-heads", "3", "--json"});
  EXPECT_EQ(known["layers"].at(0)["head_dim_qk"], 8);
}

TEST(Inspect, Npy) {
  const TemporaryFolder folder;
  const std::vector<double> values = {0.5, 1.5, -4};
  save_npy(folder / "a.npy", ConstTensor(values.data(), {3}));
  const Json json = json_of({"inspect", folder / "a.npy", "--json"});
  EXPECT_EQ(json["format"], "npy");
  EXPECT_EQ(json["tensors"][0]["dtype"], "f64");
  EXPECT_EQ(json["tensors"][0]["shape"], Json({3}));
  EXPECT_EQ(json["tensors"][0]["min"], -4);
  expect_contains(text_of({"inspect", folder / "a.npy"}), "[3]");
}

TEST(Inspect, BadFiles_AreRefused) {
  const TemporaryFolder folder;
  expect_refused(run_qkv({"inspect", folder / "absent.safetensors"}), {"absent.safetensors"});
  expect_refused(run_qkv({"inspect", folder / "absent.npy"}), {"absent.npy"});
  write_bytes(folder / "empty.safetensors", "");
  expect_refused(run_qkv({"inspect", folder / "empty.safetensors"}), {"empty.safetensors"});
  write_bytes(folder / "text.npy", "not an array");
  expect_refused(run_qkv({"inspect", folder / "text.npy"}), {"text.npy"});
  expect_refused(run_qkv({"inspect", folder.path()}), {folder.path()});
}

}  // namespace
}  // namespace qkv::test
