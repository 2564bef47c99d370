// SPDX-License-Identifier: Apache-2.0
// Tier: test. Gradients of projections: every element once by the right task, whoever runs the tasks.
#include "projection_gradient.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "kernels/kernels.h"

namespace {

using qkv::ProjectionGradientJob;

// Runs the tasks in the caller, last first.
class Backwards final : public qkv::Executor {
 public:
  void run(int64_t num_tasks, int, void (*task)(void*, int64_t), void* context) override {
    tasks += num_tasks;
    for (int64_t i = num_tasks; i-- > 0;) task(context, i);
  }
  int64_t tasks = 0;
};

// Whole numbers: every sum is exact.
struct Data {
  std::vector<float> dy, x, dw, dbias;
  ProjectionGradientJob job;

  Data(int64_t n, int64_t k, int64_t groups, int64_t rows, bool has_bias = true)
      : dy(small(groups * rows * n, 1)),
        x(small(groups * rows * k, 2)),
        dw(static_cast<size_t>(n * k), -9.0f),
        dbias(static_cast<size_t>(n), -9.0f) {
    job.n = n, job.k = k, job.groups = groups, job.rows = rows;
    job.dy = dy.data(), job.dy_group_stride = rows * n, job.dy_row_stride = n;
    job.x = x.data(), job.x_group_stride = rows * k, job.x_row_stride = k;
    job.dw = dw.data(), job.dw_row_stride = k;
    job.dbias = has_bias ? dbias.data() : nullptr;
  }
  static std::vector<float> small(int64_t n, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<float> values(static_cast<size_t>(n));
    for (float& v : values) v = static_cast<float>(static_cast<int>(random() % 9) - 4);
    return values;
  }
  void expect_sums(float before = 0) const {
    const auto n = static_cast<size_t>(job.n), k = static_cast<size_t>(job.k);
    const size_t rows = dy.size() / n;
    for (size_t j = 0; j < n; ++j) {
      float bias = before;
      for (size_t i = 0; i < rows; ++i) bias += dy[i * n + j];
      ASSERT_EQ(dbias[j], job.dbias != nullptr ? bias : -9.0f) << j;
    }
    std::vector<float> want(n * k, before);
    for (size_t i = 0; i < rows; ++i) {
      for (size_t j = 0; j < n; ++j) {
        for (size_t u = 0; u < k; ++u) want[j * k + u] += dy[i * n + j] * x[i * k + u];
      }
    }
    ASSERT_EQ(dw, want);
  }
};

TEST(ProjectionGradient, FourJobs_EachHasItsOwnResult) {
  const int64_t block = qkv::kernels::active().gradient_block;
  for (int threads : {1, 2, 7, 1000}) {
    Backwards executor;
    const Data data[] = {Data(2 * block + 9, block + 5, 2, 60), Data(70, 40, 3, 100, false),
                         Data(block, 3 * block, 1, 33), Data(5, 600, 1, 300)};
    const ProjectionGradientJob jobs[] = {data[0].job, data[1].job, data[2].job, data[3].job};
    qkv::project_gradients(jobs, threads, threads == 1000 ? &executor : nullptr);
    for (const Data& d : data) d.expect_sums();
    if (threads == 1000) {
      EXPECT_GE(executor.tasks, 3 * (block / 256) + 1 + 3 * (block / 256) + 3);
    }
  }
}

TEST(ProjectionGradient, Added_StartsFromWhatIsThere) {
  Data d(300, 280, 2, 40);
  d.job.adds = true;
  qkv::project_gradients({&d.job, 1}, 2, nullptr);
  d.expect_sums(-9);
}

TEST(ProjectionGradient, BiasAlone) {
  const int64_t block = qkv::kernels::active().gradient_block;
  Data d(block + 30, 20, 2, 40);
  d.job.dw = nullptr;
  qkv::project_gradients({&d.job, 1}, 2, nullptr);
  for (size_t j = 0; j < d.dbias.size(); ++j) {
    float sum = 0;
    for (size_t i = 0; i < 80; ++i) sum += d.dy[i * d.dbias.size() + j];
    ASSERT_EQ(d.dbias[j], sum) << j;
  }
  EXPECT_EQ(d.dw, std::vector<float>(d.dw.size(), -9.0f));
}

TEST(ProjectionGradient, NothingWanted_NothingHappens) {
  Data d(8, 8, 1, 4);
  d.job.dw = d.job.dbias = nullptr;
  qkv::project_gradients({&d.job, 1}, 2, nullptr);
  EXPECT_EQ(d.dw[0], -9.0f);
  qkv::project_gradients({}, 2, nullptr);
}

}  // namespace
