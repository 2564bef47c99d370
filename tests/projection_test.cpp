// SPDX-License-Identifier: Apache-2.0
// Tier: test. Projections: every element is computed once by the right task, whoever runs the
// tasks.
#include "projection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "support/allocations.h"

namespace {

using qkv::Projection;
using qkv::ProjectionJob;

std::vector<float> normal(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(n);
  for (float& v : values) v = distribution(random);
  return values;
}

Projection make(int64_t n, int64_t k, bool with_bias = true) {
  return Projection(normal(static_cast<size_t>(n * k), 1),
                    with_bias ? normal(static_cast<size_t>(n), 2) : std::vector<float>(), n, k);
}

// Runs the tasks in the caller, last first, and remembers what it was asked.
class Backwards final : public qkv::Executor {
 public:
  void run(int64_t num_tasks, int num_threads, void (*task)(void*, int64_t),
           void* context) override {
    ++calls;
    tasks = num_tasks, threads = num_threads;
    for (int64_t i = num_tasks; i-- > 0;) task(context, i);
  }
  int calls = 0;
  int64_t tasks = 0;
  int threads = 0;
};

// Rows one by one: the definition of what project() writes.
std::vector<float> row_by_row(const Projection& p, const std::vector<float>& x) {
  std::vector<float> y(x.size() / static_cast<size_t>(p.k()) * static_cast<size_t>(p.n()));
  for (size_t i = 0; i < x.size() / static_cast<size_t>(p.k()); ++i) {
    qkv::kernels::LinearTask t{};
    t.x = x.data() + i * static_cast<size_t>(p.k()), t.x_stride = p.k();
    t.w = p.weights(), t.bias = p.bias();
    t.y = y.data() + i * static_cast<size_t>(p.n()), t.y_stride = p.n();
    t.m = 1, t.k = p.k(), t.n = p.n();
    p.run(t);
  }
  return y;
}

TEST(Projection, DividedByTheExecutor_SameBitsAsRowByRow) {
  const struct {
    int64_t rows, n, k;
  } shapes[] = {{300, 700, 80}, {1, 9000, 70}, {129, 33, 520}, {16, 4099, 100}, {17, 2100, 64}};
  for (const auto& s : shapes) {
    for (const bool with_bias : {true, false}) {
      const Projection p = make(s.n, s.k, with_bias);
      const std::vector<float> x = normal(static_cast<size_t>(s.rows * s.k), 3);
      const std::vector<float> want = row_by_row(p, x);
      std::vector<float> y(want.size(), -1);
      Backwards executor;
      const ProjectionJob job{&p, 1, s.rows, x.data(), 0, s.k, y.data(), 0, s.n};
      qkv::project({&job, 1}, 1000, &executor);
      EXPECT_EQ(y, want) << s.rows << " " << s.n << " " << s.k;
    }
  }
}

TEST(Projection, GroupsWithGaps_SameBitsAsRowByRow) {
  const int64_t groups = 3, rows = 140, n = 600, k = 50, x_row = k + 1, x_group = rows * x_row + 9;
  const int64_t y_row = n + 2, y_group = rows * y_row + 5;
  const Projection p = make(n, k);
  const std::vector<float> packed_x = normal(static_cast<size_t>(groups * rows * k), 4);
  std::vector<float> x(static_cast<size_t>(groups * x_group), 1e30f);
  for (int64_t i = 0; i < groups * rows; ++i) {
    std::copy_n(&packed_x[static_cast<size_t>(i * k)], k,
                &x[static_cast<size_t>(i / rows * x_group + i % rows * x_row)]);
  }
  const std::vector<float> want = row_by_row(p, packed_x);
  for (int threads : {1, 8}) {
    std::vector<float> y(static_cast<size_t>(groups * y_group), -7);
    Backwards executor;
    const ProjectionJob job{&p, groups, rows, x.data(), x_group, x_row, y.data(), y_group, y_row};
    qkv::project({&job, 1}, threads, &executor);
    EXPECT_EQ(executor.calls, threads == 1 ? 0 : 1);
    for (int64_t i = 0; i < groups * rows; ++i) {
      const float* row = &y[static_cast<size_t>(i / rows * y_group + i % rows * y_row)];
      ASSERT_EQ(std::memcmp(row, &want[static_cast<size_t>(i * n)], sizeof(float) * n), 0) << i;
      EXPECT_EQ(row[n], -7) << "written past the row";
    }
  }
}

TEST(Projection, HeadsApart_SameBitsAsRowByRow) {
  const int64_t rows = 150, heads = 9, k = 60;
  const Projection probe = make(1, 1);
  const int64_t head = 4 * probe.block(), n = heads * head;
  const Projection p = make(n, k);
  const std::vector<float> x = normal(static_cast<size_t>(rows * k), 11);
  const std::vector<float> want = row_by_row(p, x);
  for (int threads : {1, 8}) {
    std::vector<float> y(want.size());
    Backwards executor;
    const ProjectionJob job{&p, 1, rows, x.data(), 0, k, y.data(), 0, head, head, rows * head};
    qkv::project({&job, 1}, threads, &executor);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        ASSERT_EQ(y[static_cast<size_t>(j / head * rows * head + i * head + j % head)],
                  want[static_cast<size_t>(i * n + j)]);
      }
    }
  }
}

TEST(Projection, InPlace_SameBitsAndSeesEveryWrite) {
  for (const int64_t rows : {3, 150}) {
    const int64_t n = 700, k = 80;
    std::vector<float> weight = normal(static_cast<size_t>(n * k), 1);
    std::vector<float> bias = normal(static_cast<size_t>(n), 2);
    const std::vector<float> x = normal(static_cast<size_t>(rows * k), 3);
    const Projection in_place = Projection::in_place(weight.data(), bias.data(), n, k);
    for (int write = 0; write < 2; ++write) {
      const std::vector<float> want = row_by_row(Projection(weight, bias, n, k), x);
      for (int threads : {1, 1000}) {
        std::vector<float> y(want.size(), -1);
        Backwards executor;
        const ProjectionJob job{&in_place, 1, rows, x.data(), 0, k, y.data(), 0, n};
        qkv::project({&job, 1}, threads, &executor);
        EXPECT_EQ(y, want) << rows << " rows, " << threads << " threads, write " << write;
      }
      weight[5] += 1, bias[699] = 3;
    }
  }
}

TEST(Projection, ThreeJobsAtOnce_EachHasItsOwnResult) {
  const Projection a = make(200, 128), b = make(16, 90), c = make(700, 40, false);
  const std::vector<float> xa = normal(150 * 128, 5), xb = normal(400 * 90, 6),
                           xc = normal(260 * 40, 7);
  const std::vector<float> wa = row_by_row(a, xa), wb = row_by_row(b, xb), wc = row_by_row(c, xc);
  std::vector<float> ya(wa.size()), yb(wb.size()), yc(wc.size());
  const ProjectionJob jobs[] = {{&a, 1, 150, xa.data(), 0, 128, ya.data(), 0, 200},
                                {&b, 1, 400, xb.data(), 0, 90, yb.data(), 0, 16},
                                {&c, 2, 130, xc.data(), 130 * 40, 40, yc.data(), 130 * 700, 700}};
  for (int threads : {1, 2, 3, 7}) {
    for (std::vector<float>* y : {&ya, &yb, &yc}) std::fill(y->begin(), y->end(), 0.0f);
    qkv::project(jobs, threads, nullptr);
    EXPECT_EQ(ya, wa);
    EXPECT_EQ(yb, wb);
    EXPECT_EQ(yc, wc);
  }
}

TEST(Projection, NumberOfTasks_DependsOnTheShapeAlone) {
  const Projection p = make(1536, 512);
  const std::vector<float> x = normal(512 * 512, 8);
  std::vector<float> y(512 * 1536);
  const ProjectionJob job{&p, 1, 512, x.data(), 0, 512, y.data(), 0, 1536};
  std::set<int64_t> tasks;
  for (int threads : {2, 3, 64}) {
    Backwards executor;
    qkv::project({&job, 1}, threads, &executor);
    EXPECT_LE(executor.threads, threads);
    tasks.insert(executor.tasks);
  }
  EXPECT_EQ(tasks.size(), 1u);
  EXPECT_GE(*tasks.begin(), 16);
}

TEST(Projection, LittleWork_WakesNobody) {
  const Projection p = make(128, 128);
  const std::vector<float> x = normal(20 * 128, 9);
  std::vector<float> y(20 * 128);
  const ProjectionJob job{&p, 1, 20, x.data(), 0, 128, y.data(), 0, 128};
  Backwards executor;
  qkv::project({&job, 1}, 8, &executor);
  EXPECT_EQ(executor.calls, 0);
  EXPECT_EQ(y, row_by_row(p, x));
}

TEST(Projection, NoRows_NothingHappens) {
  const Projection p = make(8, 8);
  const ProjectionJob jobs[] = {{&p, 1, 0, nullptr, 0, 8, nullptr, 0, 8},
                                {&p, 0, 5, nullptr, 0, 8, nullptr, 0, 8}};
  qkv::project(jobs, 4, nullptr);
}

TEST(Projection, AllocatesNothing) {
  const Projection p = make(512, 256);
  const std::vector<float> x = normal(256 * 256, 10);
  std::vector<float> y(256 * 512);
  const ProjectionJob job{&p, 1, 256, x.data(), 0, 256, y.data(), 0, 512};
  for (int threads : {1, 2}) {
    qkv::project({&job, 1}, threads, nullptr);  // the pool may start a thread here
    const int64_t before = qkv::test::num_allocations;
    qkv::project({&job, 1}, threads, nullptr);
    EXPECT_EQ(qkv::test::num_allocations, before);
  }
}

}  // namespace
