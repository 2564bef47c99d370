// SPDX-License-Identifier: Apache-2.0
// What the documents promise is what runs: the examples, the program quoted by the README, its
// commands and their output.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "qkv/weights.h"
#include "support/command.h"

namespace qkv::test {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

const std::string kSource = QKV_SOURCE_DIR "/";

// The fenced blocks of a document: language and text.
std::vector<std::pair<std::string, std::string>> blocks_of(const std::string& document) {
  std::vector<std::pair<std::string, std::string>> blocks;
  bool inside = false;
  for (const std::string& line : lines_of(document)) {
    if (line.rfind("```", 0) == 0) {
      inside = !inside;
      if (inside) blocks.emplace_back(line.substr(3), "");
    } else if (inside) {
      blocks.back().second += line + "\n";
    }
  }
  return blocks;
}

TEST(Examples, First_PrintsWhatEachQuerySees) {
  const CommandResult result = run_command({QKV_EXAMPLES "/example_first"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "query 0: 1\nquery 1: 1.5\nquery 2: 2\nquery 3: 2.5\n");
}

TEST(Examples, MiniLm_WritesTheExpectedValues) {
  const TemporaryFolder folder;
  const CommandResult result = run_command(
      {QKV_EXAMPLES "/example_minilm", kSource + "examples/data", folder / "y.safetensors"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto tokens = nlohmann::json::parse(read_bytes(kSource + "examples/data/tokens.json"));
  for (const std::string text : tokens["sentences"])
    EXPECT_NE(result.out.find(text), std::string::npos) << result.out;
  EXPECT_NE(result.out.find(folder / "y.safetensors"), std::string::npos);
  const auto got = SafetensorsFile::open(folder / "y.safetensors");
  const auto want = SafetensorsFile::open(kSource + "examples/data/layer0_expected.safetensors");
  for (const char* name : {"attention", "output"}) {
    const double tolerance = tokens["layers"][0]["tol_f32"][name];
    const std::vector<float> values = to_f32(got.tensor(name));
    const ConstTensor expected = want.tensor(name);
    ASSERT_EQ(shape_text(got.tensor(name)), shape_text(expected));
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(values[i], static_cast<const double*>(expected.data)[i], tolerance)
          << name << " " << i;
    }
  }
}

// The token named for each head is the one that the expected weights name.
TEST(Examples, MiniLm_NamesTheTokenAttendedToMost) {
  const TemporaryFolder folder;
  const CommandResult result = run_command(
      {QKV_EXAMPLES "/example_minilm", kSource + "examples/data", folder / "y.safetensors"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::vector<std::string> lines = lines_of(result.out);
  const auto tokens = nlohmann::json::parse(read_bytes(kSource + "examples/data/tokens.json"));
  const auto file = SafetensorsFile::open(kSource + "examples/data/layer0_expected.safetensors");
  const auto* weights = static_cast<const double*>(file.tensor("attention").data);
  const size_t batch = 4, n = 18, num_heads = 12;
  for (size_t b = 0; b < batch; ++b) {
    size_t line = 0;
    while (line < lines.size() && lines[line] != tokens["sentences"][b]) ++line;
    ASSERT_LT(line + 1 + num_heads, lines.size());
    size_t visible = 0;
    for (const int keep : tokens["attention_mask"][b]) visible += static_cast<size_t>(keep);
    for (size_t h = 0; h < num_heads; ++h) {
      std::vector<double> sums(visible);
      for (size_t i = 0; i < visible; ++i) {
        for (size_t j = 0; j < visible; ++j) sums[j] += weights[((h * batch + b) * n + i) * n + j];
      }
      const auto best =
          static_cast<size_t>(std::max_element(sums.begin(), sums.end()) - sums.begin());
      std::istringstream row(lines[line + 2 + h]);
      size_t head = 99;
      std::string token;
      row >> head >> token;
      EXPECT_EQ(head, h);
      EXPECT_EQ(token, tokens["tokens"][b][best]) << lines[line + 2 + h];
    }
  }
}

TEST(Examples, MiniLm_BadFolder_ExitsWith2) {
  const CommandResult result =
      run_command({QKV_EXAMPLES "/example_minilm", "/nowhere", "/nowhere/y"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("/nowhere/tokens.json"), std::string::npos) << result.err;
}

// Few steps: the loss falls from that of guessing (2.77), with heads of their own faster.
TEST(Examples, Train_LearnsAndDrawsTheLoss) {
  const TemporaryFolder folder;
  const CommandResult result =
      run_command({QKV_EXAMPLES "/example_train", "150", folder / "loss.svg"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err.find('\r'), std::string::npos) << "a bar, but this is no terminal";
  EXPECT_EQ(lines_of(result.err).size(), 3 * 10U) << result.err;
  const std::vector<std::string> lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 4U) << result.out;
  const std::pair<const char*, int64_t> layers[] = {
      {"MHA", 16640}, {"MQA", 9360}, {"MQA-wide", 18656}};
  std::vector<double> losses;
  for (size_t l = 0; l < 3; ++l) {
    std::istringstream row(lines[l + 1]);
    std::string name;
    int64_t head_dim = 0, parameters = 0, bytes = 0;
    double ms = 0, loss = 0, right = 0;
    row >> name >> head_dim >> parameters >> bytes >> ms >> loss >> right;
    EXPECT_EQ(name, layers[l].first);
    EXPECT_EQ(parameters, layers[l].second);
    EXPECT_GT(ms, 0);
    EXPECT_GT(right, 100 / 16.0) << lines[l + 1];
    losses.push_back(loss);
  }
  EXPECT_LT(losses[0], 1.9);
  EXPECT_LT(losses[0], losses[1]);
  EXPECT_LT(losses[1], 2.7);
  const std::string svg = read_bytes(folder / "loss.svg");
  EXPECT_EQ(svg.rfind("<svg ", 0), 0U);
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
  const std::regex line("<polyline points=\"(([0-9.]+,[0-9.]+ )+)\"");
  size_t curves = 0;
  for (std::sregex_iterator it(svg.begin(), svg.end(), line), end; it != end; ++it, ++curves) {
    const std::string points = (*it)[1];
    EXPECT_EQ(std::count(points.begin(), points.end(), ','), 150);
  }
  EXPECT_EQ(curves, 3U);
}

TEST(Examples, Train_BadArguments_ExitsWith2) {
  EXPECT_EQ(run_command({QKV_EXAMPLES "/example_train", "none"}).exit_code, 2);
  const CommandResult result = run_command({QKV_EXAMPLES "/example_train", "1", "/nowhere/x.svg"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("/nowhere/x.svg"), std::string::npos) << result.err;
}

TEST(Readme, QuotesTheFirstProgramVerbatim) {
  std::string program = read_bytes(kSource + "examples/first.cpp");
  program.erase(0, program.find("#include"));
  EXPECT_EQ(lines_of(program).size(), 12U);
  bool found = false;
  for (const auto& [language, text] : blocks_of(read_bytes(kSource + "README.md")))
    found = found || text == program;
  EXPECT_TRUE(found) << "README.md does not hold examples/first.cpp:\n" << program;
}

// A console block holds a command after "$ " and what it prints; a line "..." stands for any number
// of lines, and a number followed by a unit of time, or by "threads", for any such number.
TEST(Readme, CommandsPrintWhatItShows) {
  const std::regex time(R"([0-9.]+(e-[0-9]+)? (us|ms|s)\b|[0-9]+ threads?)");
  const TemporaryFolder folder;
  size_t commands = 0;
  for (const auto& [language, text] : blocks_of(read_bytes(kSource + "README.md"))) {
    if (language != "console") continue;
    const std::vector<std::string> lines = lines_of(text);
    for (size_t l = 0; l < lines.size();) {
      ASSERT_EQ(lines[l].rfind("$ ", 0), 0U) << lines[l];
      const std::string command = lines[l++].substr(2);
      std::string pattern;
      for (; l < lines.size() && lines[l].rfind("$ ", 0) != 0; ++l) pattern += lines[l] + "\n";
      if (command.rfind("build/release/qkv ", 0) != 0 ||
          command.find(" info") != std::string::npos) {
        continue;  // set-up, or words of the machine
      }
      ++commands;
      const CommandResult result =
          run_command({"/bin/sh", "-c",
                       "cd '" + folder.path() + "' && ln -sf '" + kSource + "examples' . && '" +
                           QKV_CLI_PATH "' " + command.substr(18)});
      const auto plain = [&](const std::string& t) { return std::regex_replace(t, time, "TIME"); };
      std::vector<std::string> want = lines_of(plain(pattern)),
                               got = lines_of(plain(result.out + result.err));
      size_t g = 0;
      for (size_t w = 0; w < want.size(); ++w) {
        if (want[w] == "...") {
          while (w + 1 < want.size() && g < got.size() && got[g] != want[w + 1]) ++g;
          if (w + 1 == want.size()) g = got.size();
          continue;
        }
        ASSERT_LT(g, got.size()) << command << " does not print: " << want[w];
        EXPECT_EQ(got[g++], want[w]) << command;
      }
      EXPECT_EQ(g, got.size()) << command << " prints more than the README shows";
    }
  }
  EXPECT_GE(commands, 3U);
}

TEST(Documents, LinksLeadSomewhere) {
  const std::regex link(R"(\]\(([^)#]+)(#[^)]*)?\))");
  for (const char* name : {"README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md"}) {
    const std::string text = read_bytes(kSource + name);
    EXPECT_FALSE(text.empty()) << name;
    for (std::sregex_iterator it(text.begin(), text.end(), link), end; it != end; ++it) {
      const std::string target = (*it)[1];
      if (target.find("://") != std::string::npos) continue;
      EXPECT_TRUE(std::filesystem::exists(kSource + target)) << name << " links to " << target;
    }
  }
}

}  // namespace
}  // namespace qkv::test
