// SPDX-License-Identifier: Apache-2.0
// Tier: call. Arguments of the hot functions. They are plain C functions of Python: a general
// binding layer costs more than a small attention does, and inspect.signature() reads these too.
#pragma once
#include <Python.h>

#include <array>
#include <optional>

#include "bindings_array.h"
#include "qkv/attention.h"

namespace qkv::python {

/// Names of the parameters of one function; the first num_positional may be given by position, the
/// first num_required must be given.
template <size_t N>
class Signature {
 public:
  Signature(const char* function, size_t num_positional, size_t num_required,
            const std::array<const char*, N>& names)
      : function_(function), num_positional_(num_positional), num_required_(num_required) {
    for (size_t i = 0; i < N; ++i) names_[i] = PyUnicode_InternFromString(names[i]);
  }

  /// values[i] is the argument of names[i], or nullptr. Throws PythonError (TypeError).
  void parse(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords,
             std::array<PyObject*, N>& values) const {
    values.fill(nullptr);
    const auto given = static_cast<size_t>(num_args);
    if (given > num_positional_) {
      PyErr_Format(PyExc_TypeError, "%s() takes at most %zu positional arguments, got %zu",
                   function_, num_positional_, given);
      throw PythonError();
    }
    for (size_t i = 0; i < given; ++i) values[i] = args[i];
    const Py_ssize_t num_keywords = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t k = 0; k < num_keywords; ++k) {
      PyObject* name = PyTuple_GET_ITEM(keywords, k);
      const size_t i = find(name);
      if (i == N || values[i]) {
        PyErr_Format(PyExc_TypeError,
                     i == N ? "%s() got an unexpected keyword argument '%U'"
                            : "%s() got several values for argument '%U'",
                     function_, name);
        throw PythonError();
      }
      values[i] = args[num_args + k];
    }
    for (size_t i = 0; i < num_required_; ++i) {
      if (values[i]) continue;
      PyErr_Format(PyExc_TypeError, "%s() misses the argument '%U'", function_, names_[i]);
      throw PythonError();
    }
    for (PyObject*& value : values) {
      if (value == Py_None) value = nullptr;
    }
    for (size_t i = 0; i < num_required_; ++i) {
      if (!values[i]) values[i] = Py_None;
    }
  }

 private:
  size_t find(PyObject* name) const {
    for (size_t i = 0; i < N; ++i)
      if (names_[i] == name) return i;  // both interned: the usual case
    for (size_t i = 0; i < N; ++i)
      if (PyUnicode_Compare(names_[i], name) == 0) return i;
    return N;
  }

  const char* function_;
  size_t num_positional_, num_required_;
  std::array<PyObject*, N> names_{};
};

/// nullptr -> fallback. Throws PythonError.
inline double to_double(PyObject* value, double fallback) {
  if (!value) return fallback;
  const double x = PyFloat_AsDouble(value);
  if (x == -1.0 && PyErr_Occurred()) throw PythonError();
  return x;
}
inline bool to_bool(PyObject* value) {
  if (!value) return false;
  const int is_true = PyObject_IsTrue(value);
  if (is_true < 0) throw PythonError();
  return is_true == 1;
}
int64_t to_int(PyObject* value, int64_t fallback);

/// The arguments that all attention functions share, as AttentionOptions. Keeps the arrays alive.
class OptionArguments {
 public:
  struct Values {
    PyObject *mask, *bias, *scale, *softcap, *sinks, *alibi_slopes, *dropout, *seed, *num_threads;
  };
  /// Reads every value that is not nullptr.
  OptionArguments(const Values& values, const char* caller);
  AttentionOptions options;
  /// Axes of the bias as given; options.bias has at least 2.
  int bias_rank() const { return bias_rank_; }

 private:
  Array mask_, bias_, sinks_, alibi_slopes_;
  int bias_rank_ = 0;
};

/// Runs work() without the GIL. Long work listens to Ctrl-C between its tasks: work gets an
/// executor then, and KeyboardInterrupt (PythonError) is thrown when its tasks have ended.
void run_released(double flop, Executor** executor, void (*work)(void* context), void* context);
/// Every work() runs n times from now on, so that a benchmark can tell a call's C++ part from the rest.
void set_repeats(int64_t n);
template <class Work>
void run_released(double flop, Executor** executor, Work&& work) {
  run_released(
      flop, executor, [](void* context) { (*static_cast<Work*>(context))(); }, &work);
}

}  // namespace qkv::python
