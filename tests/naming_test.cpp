// SPDX-License-Identifier: Apache-2.0
// Tier: test. The search for a layer: every naming, prefixes, fused tensors, and what is said when nothing or too much fits.
#include "naming.h"

#include <gtest/gtest.h>

#include "support/layer_files.h"

namespace {

using qkv::find_layer;
using qkv::LayerSource;
using qkv::Naming;
using qkv::ProjectionSource;
using qkv::rows_text;
using qkv::test::contains;
using qkv::test::error_text;
using qkv::test::LayerFile;

LayerFile lesson(const std::string& prefix = "") {
  LayerFile f;
  f.add(prefix + "fc_q.weight", {8, 5})
      .add(prefix + "fc_k.weight", {4, 6})
      .add(prefix + "fc_v.weight", {6, 7});
  f.add(prefix + "fc_o.weight", {3, 12});
  return f;
}

LayerFile bert(const std::string& prefix) {
  LayerFile f;
  for (const char* part : {"self.query", "self.key", "self.value", "output.dense"}) {
    f.add(prefix + part + ".weight", {4, 4}).add(prefix + part + ".bias", {4});
  }
  return f;
}

LayerFile llama(const std::string& prefix) {
  LayerFile f;
  f.add(prefix + "q_proj.weight", {8, 5})
      .add(prefix + "k_proj.weight", {4, 5})
      .add(prefix + "v_proj.weight", {4, 5});
  f.add(prefix + "o_proj.weight", {5, 8});
  return f;
}

LayerFile torch_packed(const std::string& prefix = "") {
  LayerFile f;
  f.add(prefix + "in_proj_weight", {12, 4}).add(prefix + "in_proj_bias", {12});
  f.add(prefix + "out_proj.weight", {4, 4}).add(prefix + "out_proj.bias", {4});
  return f;
}

LayerSource find(const qkv::SafetensorsFile& file, Naming naming = Naming::automatic,
                 const std::string& prefix = "") {
  return find_layer(file, naming, prefix, "caller");
}

std::string refusal(const LayerFile& f, Naming naming = Naming::automatic,
                    const std::string& prefix = "") {
  return error_text([&] { find(f.open(), naming, prefix); });
}

/// "name rows" or "-" of weight and bias of q, k, v, o.
std::vector<std::string> summary(const LayerSource& layer) {
  std::vector<std::string> texts;
  for (const ProjectionSource* p : {&layer.q, &layer.k, &layer.v, &layer.o}) {
    for (const qkv::RowsOf* rows : {&p->weight, &p->bias}) {
      texts.push_back(rows->tensor == nullptr ? "-" : rows_text(*rows));
    }
  }
  return texts;
}
using Texts = std::vector<std::string>;

TEST(Naming, Names_ReadBack) {
  for (const Naming n :
       {Naming::automatic, Naming::lesson, Naming::torch, Naming::bert, Naming::llama}) {
    EXPECT_EQ(qkv::naming_from_name(name(n)), n);
  }
  EXPECT_EQ(name(Naming::automatic), "auto");
  EXPECT_EQ(error_text([] { qkv::naming_from_name("gpt2"); }),
            "naming_from_name: unknown naming \"gpt2\", known are auto lesson torch bert llama");
  EXPECT_TRUE(contains(error_text([] { qkv::naming_from_name(""); }), "unknown naming"));
}

TEST(Naming, Lesson_BiasesMayBeAbsent) {
  const auto file = lesson().add("fc_k.bias", {4}).add("extra.weight", {9, 9, 9}).open();
  const LayerSource layer = find(file);
  EXPECT_EQ(layer.naming, Naming::lesson);
  EXPECT_EQ(layer.prefix, "");
  EXPECT_EQ(summary(layer), (Texts{"fc_q.weight [8, 5]", "-", "fc_k.weight [4, 6]", "fc_k.bias [4]",
                                   "fc_v.weight [6, 7]", "-", "fc_o.weight [3, 12]", "-"}));
}

TEST(Naming, Bert_WithTheOutputDense) {
  for (const char* prefix : {"", "attention.", "encoder.layer.3.attention."}) {
    const auto file = bert(prefix).add("encoder.layer.3.output.dense.weight", {4, 16}).open();
    const LayerSource layer = find(file);
    EXPECT_EQ(layer.naming, Naming::bert);
    EXPECT_EQ(layer.prefix, prefix);
    EXPECT_EQ(layer.o.weight.tensor->name, std::string(prefix) + "output.dense.weight");
    EXPECT_EQ(layer.o.bias.tensor->name, std::string(prefix) + "output.dense.bias");
    EXPECT_EQ(layer.k.bias.tensor->name, std::string(prefix) + "self.key.bias");
  }
}

TEST(Naming, Torch_PackedRowsAreQThenKThenV) {
  for (const char* prefix : {"", "self_attn."}) {
    const std::string p = prefix;
    const auto file = torch_packed(p).open();
    const LayerSource layer = find(file);
    EXPECT_EQ(layer.naming, Naming::torch);
    EXPECT_EQ(
        summary(layer),
        (Texts{p + "in_proj_weight [12, 4] rows [0, 4)", p + "in_proj_bias [12] rows [0, 4)",
               p + "in_proj_weight [12, 4] rows [4, 8)", p + "in_proj_bias [12] rows [4, 8)",
               p + "in_proj_weight [12, 4] rows [8, 12)", p + "in_proj_bias [12] rows [8, 12)",
               p + "out_proj.weight [4, 4]", p + "out_proj.bias [4]"}));
  }
}

TEST(Naming, Torch_OwnWidthsOfKAndV_KeepThePackedBias) {
  LayerFile f;
  f.add("q_proj_weight", {4, 4})
      .add("k_proj_weight", {4, 6})
      .add("v_proj_weight", {4, 7})
      .add("in_proj_bias", {12});
  const auto file = f.add("out_proj.weight", {4, 4}).open();
  EXPECT_EQ(summary(find(file)),
            (Texts{"q_proj_weight [4, 4]", "in_proj_bias [12] rows [0, 4)", "k_proj_weight [4, 6]",
                   "in_proj_bias [12] rows [4, 8)", "v_proj_weight [4, 7]",
                   "in_proj_bias [12] rows [8, 12)", "out_proj.weight [4, 4]", "-"}));
}

TEST(Naming, Torch_BiasKAndBiasV_AreRefusedWithTheReason) {
  EXPECT_EQ(refusal(torch_packed().add("bias_k", {1, 1, 4})),
            "caller: F: torch layer \"\": bias_k adds one learned key and value to every sequence "
            "(add_bias_kv), which this "
            "layer does not have");
  EXPECT_TRUE(contains(refusal(torch_packed("a.").add("a.bias_v", {1, 1, 4})),
                       "torch layer \"a.\": bias_v adds"));
}

TEST(Naming, Torch_WrongShapes) {
  EXPECT_TRUE(contains(refusal(torch_packed().remove("in_proj_bias").add("in_proj_bias", {11})),
                       "in_proj_bias [11] does not fit in_proj_weight [12, 4] rows [0, 4)"));
  EXPECT_TRUE(
      contains(refusal(torch_packed().remove("in_proj_weight").add("in_proj_weight", {13, 4})),
               "in_proj_weight [13, 4] cannot be split into q, k and v: out_proj.weight [4, 4] "
               "says that q has 4 rows"));
  EXPECT_TRUE(
      contains(refusal(torch_packed().remove("in_proj_weight").add("in_proj_weight", {8, 4})),
               "cannot be split"))
      << "torch has no grouped heads";
  EXPECT_TRUE(
      contains(refusal(torch_packed().remove("in_proj_weight").add("in_proj_weight", {12, 4, 1})),
               "must have 2 axes"));
  EXPECT_TRUE(contains(refusal(torch_packed().remove("in_proj_bias").add("in_proj_bias", {12, 1})),
                       "must have 1 axis"));
  EXPECT_TRUE(contains(refusal(torch_packed().add("k_proj_weight", {4, 4})),
                       "has both k_proj_weight and in_proj_weight"));
  EXPECT_TRUE(
      contains(refusal(torch_packed().remove("out_proj.weight")), "out_proj.weight is missing"));
}

TEST(Naming, Llama_SeparateAndFused) {
  const std::string p = "model.layers.0.self_attn.";
  const auto separate = llama(p).add(p + "q_proj.bias", {8}).open();
  EXPECT_EQ(find(separate).naming, Naming::llama);
  EXPECT_EQ(find(separate).prefix, p);
  EXPECT_EQ(find(separate).q.bias.count, 8);
  EXPECT_EQ(find(separate).k.bias.tensor, nullptr);

  LayerFile f;
  f.add("qkv_proj.weight", {16, 5}).add("qkv_proj.bias", {16}).add("o_proj.weight", {5, 8});
  const auto fused = f.open();
  EXPECT_EQ(summary(find(fused)),
            (Texts{"qkv_proj.weight [16, 5] rows [0, 8)", "qkv_proj.bias [16] rows [0, 8)",
                   "qkv_proj.weight [16, 5] rows [8, 12)", "qkv_proj.bias [16] rows [8, 12)",
                   "qkv_proj.weight [16, 5] rows [12, 16)", "qkv_proj.bias [16] rows [12, 16)",
                   "o_proj.weight [5, 8]", "-"}));
  EXPECT_TRUE(contains(refusal(f.remove("qkv_proj.weight").add("qkv_proj.weight", {8, 5})),
                       "cannot be split"));
  EXPECT_TRUE(contains(refusal(f.remove("qkv_proj.weight").add("qkv_proj.weight", {15, 5})),
                       "cannot be split"));
  EXPECT_TRUE(contains(
      refusal(f.remove("qkv_proj.weight").add("qkv_proj.weight", {16, 5}).add("v_proj.bias", {4})),
      "has both v_proj.bias and qkv_proj.bias"));
}

TEST(Naming, Incomplete_NamesWhatIsMissing) {
  EXPECT_EQ(refusal(lesson().remove("fc_v.weight")),
            "caller: F: lesson layer \"\": fc_v.weight is missing");
  EXPECT_EQ(refusal(lesson().remove("fc_q.weight")),
            "caller: F: lesson layer \"\": fc_q.weight is missing");
  EXPECT_EQ(refusal(llama("m.").remove("m.o_proj.weight")),
            "caller: F: llama layer \"m.\": o_proj.weight is missing");
}

TEST(Naming, WrongRankAndBias_NameTheShapes) {
  EXPECT_TRUE(contains(refusal(lesson().remove("fc_k.weight").add("fc_k.weight", {24})),
                       "fc_k.weight [24] must have 2 axes, [out, in]"));
  EXPECT_TRUE(
      contains(refusal(lesson().add("fc_o.bias", {4})),
               "fc_o.bias [4] does not fit fc_o.weight [3, 12]: one number per row is wanted"));
  EXPECT_TRUE(
      contains(refusal(lesson().add("fc_o.bias", {3, 1})), "fc_o.bias [3, 1] must have 1 axis"));
}

TEST(Naming, NothingFits_ListsWhatWasLookedFor) {
  LayerFile f;
  f.add("c_attn.weight", {12, 4}).add("my_q_proj.weight", {4, 4});
  EXPECT_EQ(refusal(f),
            "caller: F: holds no layer, looked for lesson (fc_q.weight fc_k.weight fc_v.weight, "
            "fc_o.weight), "
            "torch (q_proj_weight k_proj_weight v_proj_weight or in_proj_weight, out_proj.weight), "
            "bert (self.query.weight self.key.weight self.value.weight, output.dense.weight), "
            "llama (q_proj.weight k_proj.weight v_proj.weight or qkv_proj.weight, o_proj.weight); "
            "the file has \"c_attn.weight\", \"my_q_proj.weight\"");
  EXPECT_EQ(refusal(lesson(), Naming::bert),
            "caller: F: holds no layer, looked for bert (self.query.weight self.key.weight "
            "self.value.weight, "
            "output.dense.weight); the file has \"fc_k.weight\", \"fc_o.weight\", \"fc_q.weight\", "
            "\"fc_v.weight\"");
  EXPECT_TRUE(contains(refusal(LayerFile()), "the file has no tensors"));
  for (int i = 0; i < 20; ++i) f.add(std::string("t") + std::to_string(i), {1});
  EXPECT_TRUE(contains(refusal(f), " and 14 more"));
}

TEST(Naming, TwoNamings_MustBeChosen) {
  LayerFile both = lesson();
  both.add("q_proj.weight", {8, 5})
      .add("k_proj.weight", {4, 5})
      .add("v_proj.weight", {4, 5})
      .add("o_proj.weight", {5, 8});
  EXPECT_EQ(
      refusal(both),
      "caller: F: holds 2 layers: lesson \"\", llama \"\"; choose one with --prefix or --names");
  EXPECT_EQ(find(both.open(), Naming::llama).naming, Naming::llama);
  EXPECT_EQ(find(both.open(), Naming::lesson).naming, Naming::lesson);
}

TEST(Naming, SeveralLayers_AreListedAndChosenByPrefix) {
  LayerFile f;
  for (const char* p : {"m.1.self_attn.", "m.10.self_attn.", "m.2.self_attn.", "m.2.cross_attn."}) {
    const std::string prefix = p;
    f.add(prefix + "q_proj.weight", {8, 5})
        .add(prefix + "k_proj.weight", {4, 5})
        .add(prefix + "v_proj.weight", {4, 5});
    f.add(prefix + "o_proj.weight", {5, 8});
  }
  EXPECT_EQ(refusal(f),
            "caller: F: holds 4 layers: llama \"m.1.self_attn.\", llama \"m.10.self_attn.\", llama "
            "\"m.2.cross_attn.\", "
            "llama \"m.2.self_attn.\"; choose one with --prefix or --names");
  const auto file = f.open();
  EXPECT_EQ(find(file, Naming::automatic, "m.1").prefix, "m.1.self_attn.") << "not m.10";
  EXPECT_EQ(find(file, Naming::automatic, "m.1.").prefix, "m.1.self_attn.");
  EXPECT_EQ(find(file, Naming::llama, "m.10.self_attn").prefix, "m.10.self_attn.");
  EXPECT_TRUE(contains(refusal(f, Naming::automatic, "m.2"),
                       "holds 2 layers: llama \"m.2.cross_attn.\", llama \"m.2.self_attn.\""));
  EXPECT_EQ(find(file, Naming::automatic, "m.2.cross_attn").prefix, "m.2.cross_attn.");
  EXPECT_EQ(
      refusal(f, Naming::automatic, "m.3"),
      "caller: F: holds no layer under the prefix \"m.3\"; it has llama \"m.1.self_attn.\", llama "
      "\"m.10.self_attn.\", llama \"m.2.cross_attn.\", llama \"m.2.self_attn.\"");
}

TEST(Naming, NoPrefix_WinsInItsNaming) {
  LayerFile f = lesson();
  f.add("teacher.fc_q.weight", {2, 2}).add("teacher.fc_k.weight", {2, 2});
  const auto file = f.open();
  EXPECT_EQ(find(file).prefix, "");
  EXPECT_TRUE(contains(refusal(f, Naming::automatic, "teacher"),
                       "lesson layer \"teacher.\": fc_o.weight is missing"));
  const auto prefixed = lesson("student.").open();
  EXPECT_EQ(find(prefixed).prefix, "student.") << "the only layer needs no choice";
}

TEST(Naming, ListLayers_CompleteOrNot) {
  LayerFile f = lesson();
  f.add("teacher.fc_k.weight", {2, 2}).add("m.in_proj_weight", {12, 4}).add("other", {1});
  f.add("not_fc_q.weight", {2, 2});
  std::vector<std::string> found;
  for (const qkv::LayerName& layer : list_layers(f.open())) {
    found.push_back(std::string(name(layer.naming)) + " " + layer.prefix);
  }
  EXPECT_EQ(found, (std::vector<std::string>{"lesson ", "lesson teacher.", "torch m."}));
  EXPECT_TRUE(list_layers(LayerFile().add("other", {1}).open()).empty());
}

}  // namespace
