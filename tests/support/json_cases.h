// SPDX-License-Identifier: Apache-2.0
// Reads masks and tensors as the golden files describe them (attention_cases/index.json, bug_cases_dev.jsonl).
#pragma once
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/tensors.h"

namespace qkv::test {

using Json = nlohmann::json;

/// Values in double, row-major.
struct Array {
  std::vector<int64_t> shape;
  std::vector<double> values;

  TestTensor tensor(DType dtype, Layout layout = Layout::contiguous) const {
    return {dtype, shape, values, layout};
  }
};

inline double number(const Json& x) {
  if (!x.is_string()) return x.is_boolean() ? x.get<bool>() : x.get<double>();
  const std::string text = x.get<std::string>();
  const double infinity = std::numeric_limits<double>::infinity();
  if (text == "inf") return infinity;
  if (text == "-inf") return -infinity;
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  throw Error("json_cases: not a number: " + text);
}

inline int64_t product(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t extent : shape) n *= extent;
  return n;
}

/// Nested lists: numbers, booleans, "inf", "-inf", "nan".
inline Array array_of_list(const Json& x) {
  Array a;
  for (const Json* level = &x; level->is_array(); level = &level->front()) {
    a.shape.push_back(static_cast<int64_t>(level->size()));
    if (level->empty()) break;
  }
  const std::function<void(const Json&)> collect = [&](const Json& e) {
    if (!e.is_array()) return a.values.push_back(number(e));
    for (const Json& part : e) collect(part);
  };
  collect(x);
  return a;
}

/// Calls f with every index of a row-major array and its position.
inline void for_each_index(const std::vector<int64_t>& shape,
                           const std::function<void(const std::vector<int64_t>&, size_t)>& f) {
  std::vector<int64_t> index(shape.size());
  for (size_t at = 0; at < static_cast<size_t>(product(shape)); ++at) {
    f(index, at);
    for (size_t a = shape.size(); a-- > 0 && ++index[a] == shape[a];) index[a] = 0;
  }
}

/// {"G": seed, "amp"}, {"full"}, {"ramp": axis, "start", "step", "log"} with "shape", then "take" and "set".
inline Array array_of(const Json& x) {
  if (x.is_array()) return array_of_list(x);
  if (!x.is_object()) return {{}, {number(x)}};
  Array a{x.at("shape").get<std::vector<int64_t>>(), {}};
  a.values.resize(static_cast<size_t>(product(a.shape)));
  if (x.contains("G")) {
    uint32_t state = x.at("G").get<uint32_t>();
    for (double& value : a.values) {
      state = 1664525u * state + 1013904223u;
      value = (static_cast<double>(state >> 8) - 8388608.0) / 8388608.0 * x.value("amp", 1.0);
    }
  } else if (x.contains("full")) {
    std::fill(a.values.begin(), a.values.end(), number(x.at("full")));
  } else {
    const size_t axis = x.at("ramp").get<size_t>();
    for_each_index(a.shape, [&](const std::vector<int64_t>& index, size_t at) {
      const double value =
          x.value("start", 0.0) + x.value("step", 1.0) * static_cast<double>(index[axis]);
      a.values[at] = x.value("log", false) ? std::log(value) : value;
    });
  }
  if (x.contains("take")) {
    Array taken{a.shape, {}};
    taken.shape[2] = std::min(a.shape[2], x.at("take").get<int64_t>());
    for_each_index(a.shape, [&](const std::vector<int64_t>& index, size_t at) {
      if (index[2] < taken.shape[2]) taken.values.push_back(a.values[at]);
    });
    a = std::move(taken);
  }
  for (const Json& change : x.value("set", Json::array())) {
    const Json& where = change.at(0);
    for_each_index(a.shape, [&](const std::vector<int64_t>& index, size_t at) {
      bool is_inside = true;
      for (size_t axis = 0; axis < where.size(); ++axis) {
        const Json& w = where[axis];
        if (w.is_array())
          is_inside &= w[0].get<int64_t>() <= index[axis] && index[axis] < w[1].get<int64_t>();
        if (w.is_number()) is_inside &= index[axis] == w.get<int64_t>();
      }
      if (is_inside) a.values[at] = number(change.at(1));
    });
  }
  return a;
}

/// Masks, with the arrays they point to. `named` gives the boolean tensor that a mask refers to by name.
class JsonMasks {
 public:
  Mask make(const Json& m, const std::function<Array(const std::string&)>& named = {}) {
    if (m.is_null()) return {};
    const std::string kind = m.at("kind").get<std::string>();
    if (kind == "full") return Mask::full();
    if (kind == "causal_top_left") return Mask::causal_top_left();
    if (kind == "causal_bottom_right") return Mask::causal_bottom_right();
    if (kind == "prefix") return Mask::prefix(m.at("n").get<int64_t>());
    if (kind == "chunk") return Mask::chunk(m.at("size").get<int64_t>());
    if (kind == "lengths") return Mask::lengths(m.at("kv_lengths").get<std::vector<int64_t>>());
    if (kind == "documents") return Mask::documents(ids(m.at("q_ids")), ids(m.at("kv_ids")));
    if (kind == "window") {
      auto side = [&](const char* name) {
        return m.at(name).is_null() ? -1 : m.at(name).get<int64_t>();
      };
      const bool is_top_left = m.value("alignment", "bottom_right") == "top_left";
      return Mask::window(side("left"), side("right"),
                          is_top_left ? Alignment::top_left : Alignment::bottom_right);
    }
    if (kind == "bool") {
      Array a =
          m.contains("data") ? array_of(m.at("data")) : named(m.at("tensor").get<std::string>());
      if (a.shape.size() == 1) a.shape.insert(a.shape.begin(), 1);  // [n_kv] of NumPy
      return Mask::dense(arrays_.emplace_back(a.tensor(DType::boolean)));
    }
    if (kind != "and") throw Error("json_cases: unknown mask " + kind);
    Mask all;
    for (const Json& part : m.at("of")) all = all & make(part, named);
    return all;
  }

 private:
  const TestTensor& ids(const Json& x) {
    return arrays_.emplace_back(array_of_list(x).tensor(DType::i64));
  }
  std::deque<TestTensor> arrays_;
};

}  // namespace qkv::test
