// SPDX-License-Identifier: Apache-2.0
// Tier: call. The binary interface of DLPack 1 (dmlc.github.io/dlpack): what array libraries hand
// to each other. Only declarations; bindings_array.cpp reads and makes arrays with them.
#pragma once
#include <cstdint>

namespace qkv::python::dlpack {

enum DeviceType : int32_t { kCpu = 1 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };
inline constexpr uint64_t kFlagReadOnly = 1;

struct Device {
  int32_t type, id;
};
struct Type {
  uint8_t code, bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  Type dtype;
  int64_t* shape;
  int64_t* strides;  // elements; nullptr: C order
  uint64_t byte_offset;
};
/// Payload of a capsule "dltensor".
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};
struct Version {
  uint32_t major, minor;
};
/// Payload of a capsule "dltensor_versioned".
struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  Tensor tensor;
};

/// Function table behind type.__dlpack_c_exchange_api__ (capsule "dlpack_exchange_api"): arrays in
/// and out without a Python call. Each function returns 0, or -1 with a Python error set.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(Tensor* prototype, ManagedTensorVersioned** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  int (*from_object)(void* object, ManagedTensorVersioned** out);
  int (*to_object)(ManagedTensorVersioned* tensor, void** out_object);
  int (*borrow)(void* object, Tensor* out);  // shape and strides belong to the object
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out_stream);
};

}  // namespace qkv::python::dlpack
