// SPDX-License-Identifier: Apache-2.0
// qkv run on bad input: each case ends with exit 2, one line on stderr that names the file and what
// is wrong, and no output file, whole, partial or temporary.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>

#include <cmath>
#include <functional>

#include "qkv/qkv.h"
#include "support/cli.h"

namespace qkv::test {
namespace {

const std::string kLayer = data_path("layers/seed_mha/");

class BadInput : public testing::Test {
 protected:
  TemporaryFolder files_, outputs_;
  std::string weights_ = kLayer + "weights.safetensors";
  std::string input_ = kLayer + "input_triu.safetensors";

  CommandResult run(const std::vector<std::string>& more = {}) {
    std::vector<std::string> args = {
        "run", "--weights", weights_, "--input", input_, "--output", outputs_ / "y.safetensors"};
    args.insert(args.end(), more.begin(), more.end());
    return run_qkv(args);
  }

  void expect_bad(const std::vector<std::string>& words,
                  const std::vector<std::string>& more = {}) {
    expect_refused(run(more), words);
    EXPECT_TRUE(outputs_.names().empty());
  }

  // Writes a file that takes the place of the weights or the input.
  std::string file(const std::string& bytes) {
    const std::string path =
        files_ / ("bad" + std::to_string(files_.names().size()) + ".safetensors");
    write_bytes(path, bytes);
    return path;
  }
  void expect_bad_weights(const std::string& bytes, std::vector<std::string> words) {
    weights_ = file(bytes);
    words.push_back(weights_);
    expect_bad(words);
  }
  void expect_bad_input(const std::string& bytes, std::vector<std::string> words) {
    input_ = file(bytes);
    words.push_back(input_);
    expect_bad(words);
  }

  using Change =
      std::function<void(std::vector<NamedTensor>&, std::map<std::string, std::string>&)>;
  std::string changed(const std::string& path, const Change& change) {
    const auto source = SafetensorsFile::open(path);
    std::vector<NamedTensor> tensors;
    for (const TensorInfo& t : source.tensors()) tensors.push_back({t.name, source.tensor(t.name)});
    auto metadata = source.metadata();
    change(tensors, metadata);
    const std::string copy =
        files_ / ("bad" + std::to_string(files_.names().size()) + ".safetensors");
    save_safetensors(copy, tensors, metadata);
    return copy;
  }
  // The tensor of that name gets another shape of no more elements.
  static Change reshaped(const std::string& name, std::vector<int64_t> shape) {
    return [name, shape](auto& tensors, auto&) {
      for (NamedTensor& t : tensors) {
        if (t.name == name) t.tensor = ConstTensor(t.tensor.data, t.tensor.dtype, shape);
      }
    };
  }
  static Change with_metadata(const std::string& key, const std::string& value) {
    return [key, value](auto&, auto& metadata) { metadata[key] = value; };
  }
};

TEST_F(BadInput, MissingFiles) {
  const std::string weights = std::exchange(weights_, files_ / "absent.safetensors");
  expect_bad({"absent.safetensors", "No such file", "--weights"});
  weights_ = weights;
  input_ = files_ / "gone.safetensors";
  expect_bad({"gone.safetensors", "No such file", "--input"});
  input_ = files_.path();
  expect_bad({input_, "folder"});
}

TEST_F(BadInput, Truncated) {
  const std::string weights = read_bytes(weights_);
  for (const size_t size : {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{100},
                            weights.size() / 2, weights.size() - 1}) {
    SCOPED_TRACE(size);
    expect_bad_weights(weights.substr(0, size), {});
  }
  weights_ = kLayer + "weights.safetensors";
  const std::string input = read_bytes(input_);
  expect_bad_input(input.substr(0, input.size() - 1), {"byte"});
}

TEST_F(BadInput, HeaderLies) {
  const auto entry = [](const std::string& dtype, const std::string& shape,
                        const std::string& offsets) {
    return R"({"q":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
           "}}";
  };
  const std::string good = entry(R"("F32")", "[1,1,128]", "[0,512]");
  const auto expect = [&](const std::string& header, size_t data_bytes, int64_t header_bytes = -1) {
    SCOPED_TRACE(header);
    expect_bad_input(safetensors_bytes(header, data_bytes, header_bytes), {});
  };
  expect(good, 512, 1 << 20);                                  // longer than the file
  expect(good, 512, INT64_MAX);                                // much longer
  expect(good, 512, 0);                                        // nothing in it
  expect(entry(R"("F33")", "[1,1,128]", "[0,512]"), 512);      // unknown dtype
  expect(entry("32", "[1,1,128]", "[0,512]"), 512);            // a dtype that is no text
  expect(entry(R"("F32")", "[1,1,NaN]", "[0,512]"), 512);      // NaN where a size should be
  expect(entry(R"("F32")", "[1,1,1e2]", "[0,400]"), 400);      // a fraction's notation
  expect(entry(R"("F32")", "[1,1,-128]", "[0,512]"), 512);     // negative
  expect(entry(R"("F32")", "[1,1,\"128\"]", "[0,512]"), 512);  // text
  expect(entry(R"("F32")", "[4294967296,4294967296,4]", "[0,512]"), 512);  // product beyond 64 bits
  expect(entry(R"("F32")", "[1,1,128]", "[0,508]"), 512);     // fewer bytes than the shape needs
  expect(entry(R"("F32")", "[1,1,128]", "[512,0]"), 512);     // backwards
  expect(entry(R"("F32")", "[1,1,128]", "[512,1024]"), 512);  // behind the end
  expect(entry(R"("F32")", "[1,1,128]", "[NaN,512]"), 512);
  expect(
      R"({"q":{"dtype":"F32","shape":[1,1,128],"data_offsets":[0,512]},"k":{"dtype":"F32","shape":[1,1,128],"data_offsets":[256,768]}})",
      768);
  expect(R"({"q":1,"q":2})", 0);              // the same key twice
  expect("[" + std::string(100000, '['), 0);  // deep
  expect("{\"\xff\":1}", 0);                  // not UTF-8
  expect("not json", 0);
}

TEST_F(BadInput, Overlap_IsNamed) {
  expect_bad_input(
      safetensors_bytes(R"({"q":{"dtype":"F32","shape":[1,1,128],"data_offsets":[0,512]},)"
                        R"("k":{"dtype":"F32","shape":[1,1,128],"data_offsets":[256,768]}})",
                        768),
      {"overlap"});
}

TEST_F(BadInput, WrongRank) {
  input_ = changed(kLayer + "input_triu.safetensors", reshaped("q", {20, 128}));
  expect_bad({input_, "[20, 128]", "[batch, tokens, 128]"});
  input_ = changed(kLayer + "input_triu.safetensors", reshaped("v", {10, 4, 64, 1}));
  expect_bad({input_, "[10, 4, 64, 1]"});
  input_ = changed(kLayer + "input_triu.safetensors", reshaped("mask", {80}));
  expect_bad({input_, "mask [80]", "[10, 2, 4]"});
  input_ = kLayer + "input_triu.safetensors";
  weights_ = changed(kLayer + "weights.safetensors", reshaped("fc_q.weight", {16384}));
  expect_bad({weights_, "fc_q.weight", "[16384]"});
}

TEST_F(BadInput, SizesThatDoNotFit_BothShapesAreNamed) {
  const std::string source = kLayer + "input_triu.safetensors";
  const auto expect = [&](const std::string& name, std::vector<int64_t> shape,
                          const std::vector<std::string>& words) {
    SCOPED_TRACE(name + " " + shape_text(ConstTensor(&source, DType::u8, shape)));
    input_ = changed(source, reshaped(name, std::move(shape)));
    expect_bad(words);
  };
  expect("q", {10, 2, 64}, {"q [10, 2, 64]", "fc_q.weight [128, 128]"});
  expect("k", {10, 4, 64}, {"k [10, 4, 64]", "fc_k.weight [128, 128]"});
  expect("v", {10, 4, 32}, {"v [10, 4, 32]", "fc_v.weight [128, 64]"});
  expect("k", {10, 3, 128}, {"k [10, 3, 128]", "v [10, 4, 64]"});
  expect("v", {5, 4, 64}, {"k [10, 4, 128]", "v [5, 4, 64]"});
  expect("q", {5, 2, 128}, {"q [5, 2, 128]", "k [10, 4, 128]"});
  expect("mask", {10, 4, 2}, {"mask [10, 4, 2]", "q [10, 2, 128]", "k [10, 4, 128]"});
  expect("mask", {5, 2, 4}, {"mask [5, 2, 4]", "[10, 2, 4]"});

  input_ = source;
  weights_ = changed(kLayer + "weights.safetensors", reshaped("fc_o.weight", {8, 64}));
  expect_bad({weights_, "[8, 64]"});
  weights_ = changed(kLayer + "weights.safetensors", reshaped("fc_k.bias", {64}));
  expect_bad({weights_, "fc_k.bias", "[64]"});
}

TEST_F(BadInput, ElementTypes) {
  const std::vector<int32_t> ids(10 * 4 * 128);
  const auto integers = [&](const std::string& wanted, std::vector<int64_t> shape) {
    return changed(kLayer + "input_triu.safetensors", [&](auto& tensors, auto&) {
      for (NamedTensor& t : tensors) {
        if (t.name == wanted) t.tensor = ConstTensor(ids.data(), DType::i32, shape);
      }
    });
  };
  input_ = integers("k", {10, 4, 128});
  expect_bad({"k [10, 4, 128]", "i32", "f32"});
  input_ = integers("mask", {10, 2, 4});
  expect_bad({"mask [10, 2, 4]", "i32", "bool"});
}

TEST_F(BadInput, NothingToRunOn) {
  const float value = 0;
  save_safetensors(files_ / "other.safetensors", {{"y", ConstTensor(&value, {1})}});
  input_ = files_ / "other.safetensors";
  expect_bad({input_, "neither q nor x", "y"});
  input_ = kLayer + "input_triu.safetensors";
  weights_ = files_ / "other.safetensors";
  expect_bad({weights_});
}

TEST_F(BadInput, NumHeads) {
  expect_bad({"7", "num_heads"}, {"--num-heads", "7"});  // the metadata says 8
  const std::string source = kLayer + "weights.safetensors";
  const auto expect = [&](const std::string& key, const std::string& value) {
    SCOPED_TRACE(key + " = " + value);
    weights_ = changed(source, with_metadata(key, value));
    expect_bad({weights_, key, value});
  };
  for (const char* value :
       {"7", "0", "-8", "eight", "nan", "NaN", "8.5", "1e3", "99999999999999999999", "16384"}) {
    expect("num_heads", value);
  }
  for (const char* value : {"3", "0", "nan", "16", "2"}) expect("num_kv_heads", value);
  weights_ = changed(source, [](auto&, auto& metadata) { metadata.clear(); });
  expect_bad({weights_, "num_heads"});
  expect_bad({weights_, "num_heads", "7"}, {"--num-heads", "7"});
  EXPECT_EQ(run({"--num-heads", "8"}).exit_code, 0);
}

TEST_F(BadInput, Flags) {
  expect_bad({"--num-heads", "'nan'"}, {"--num-heads", "nan"});
  expect_bad({"two meanings"}, {"--mask", "causal"});
  expect_bad({"prefix:N"}, {"--mask", "prefix"});
  expect_bad({"--mask", "lengths"}, {"--mask", "lengths:1,2"});  // the batch has ten entries
  expect_bad({"--mask", "5"}, {"--mask", "lengths:1,1,1,1,1,1,1,1,1,5"});
  expect_bad({"--names", "pytorch", "lesson"}, {"--names", "pytorch"});
  expect_bad({"llama"}, {"--names", "llama"});
}

TEST_F(BadInput, OutputPath) {
  const auto expect = [&](const std::string& path, const std::vector<std::string>& words) {
    expect_refused(run_qkv({"run", "--weights", weights_, "--input", input_, "--output", path}),
                   words);
  };
  expect(outputs_ / "absent/y.safetensors", {"absent", "--output"});
  expect(outputs_.path(), {outputs_.path(), "folder", "--output"});
  expect("", {"--output"});
  expect(outputs_ / std::string(300, 'y'), {"yyyy", "--output"});
  write_bytes(outputs_ / "file", "");
  expect(outputs_ / "file/y.safetensors", {"file", "--output"});
  std::filesystem::copy_file(input_, outputs_ / "x.safetensors");
  input_ = outputs_ / "x.safetensors";
  const std::string before = read_bytes(input_);
  expect(input_, {input_, "also read", "--output"});
  EXPECT_EQ(read_bytes(input_), before);
  EXPECT_EQ(outputs_.names().size(), 2U);
  if (std::filesystem::exists("/proc/self/status"))
    expect("/proc/y.safetensors", {"/proc/y.safetensors", "--output"});
}

TEST_F(BadInput, FullDisk_KeepsTheOlderFile) {
  const std::vector<std::string> args = {
      "run", "--weights", weights_, "--input", input_, "--output", outputs_ / "y.safetensors"};
  // A write beyond the limit fails half way through, as on a full disk.
  expect_refused(run_qkv(args, {.most_file_bytes = 2000}),
                 {"y.safetensors", "File too large", "--output"});
  EXPECT_TRUE(outputs_.names().empty());
  write_bytes(outputs_ / "y.safetensors", "old");
  expect_refused(run_qkv(args, {.most_file_bytes = 2000}), {"y.safetensors"});
  EXPECT_EQ(read_bytes(outputs_ / "y.safetensors"), "old");
  EXPECT_EQ(outputs_.names().size(), 1U);
}

// The real thing, where this process may mount a file system of its own.
TEST_F(BadInput, FullFileSystem) {
  weights_ = data_path("layers/twelve_heads/weights.safetensors");  // writes 12 kB
  input_ = data_path("layers/twelve_heads/input_nomask.safetensors");
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    constexpr int kCannot = 77;
    if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) _exit(kCannot);
    mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
    if (mount("none", outputs_.path().c_str(), "tmpfs", 0, "size=4096") != 0) _exit(kCannot);
    const CommandResult result = run();
    expect_refused(result, {"y.safetensors", "No space left", "--output"});
    EXPECT_TRUE(outputs_.names().empty());
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "this process may not mount a file system";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace qkv::test
