// SPDX-License-Identifier: Apache-2.0
// The whole public surface of qkv, and its version.
#pragma once
#define QKV_VERSION "0.1.0"

#include "qkv/attention.h"
#include "qkv/dtype.h"
#include "qkv/error.h"
#include "qkv/kv_cache.h"
#include "qkv/layer.h"
#include "qkv/mask.h"
#include "qkv/plan.h"
#include "qkv/rope.h"
#include "qkv/runtime.h"
#include "qkv/tensor.h"
#include "qkv/weights.h"
