// SPDX-License-Identifier: Apache-2.0
// Names and pictures of masks. The pictures are those of the table in mask.h.
#include <gtest/gtest.h>

#include "qkv/mask.h"

namespace qkv {
namespace {

TEST(MaskPicture, TableOfTheHeader) {
  const MaskShape shape{1, 1, 4, 6};
  EXPECT_EQ(Mask::causal_top_left().to_text(shape), "x.....\nxx....\nxxx...\nxxxx..\n");
  EXPECT_EQ(Mask::causal_bottom_right().to_text(shape), "xxx...\nxxxx..\nxxxxx.\nxxxxxx\n");
  EXPECT_EQ(Mask::window(1, 0).to_text(shape), ".xx...\n..xx..\n...xx.\n....xx\n");
  EXPECT_EQ(Mask::prefix(4).to_text(shape), "xxxx..\nxxxx..\nxxxxx.\nxxxxxx\n");
  EXPECT_EQ(Mask::chunk(3).to_text(shape), "xxx...\n...xxx\n...xxx\n...xxx\n");
  EXPECT_EQ(Mask::full().to_text({1, 1, 2, 3}), "xxx\nxxx\n");
  EXPECT_EQ(Mask::full().to_text({1, 1, 2, 0}), "\n\n");
  EXPECT_EQ(Mask::full().to_text({1, 1, 0, 3}), "");
}

TEST(MaskPicture, Names) {
  const int64_t lengths[] = {5, 3};
  const bool dense[4] = {};
  EXPECT_EQ(Mask::full().name(), "full");
  EXPECT_EQ((Mask::causal_bottom_right() & Mask::lengths(lengths)).name(),
            "causal_bottom_right & lengths(5, 3)");
  EXPECT_EQ((Mask::window(2, -1, Alignment::top_left) & Mask::prefix(4) & Mask::chunk(8)).name(),
            "window(2, -1, top_left) & prefix(4) & chunk(8)");
  EXPECT_EQ(Mask::dense(ConstTensor(dense, {2, 2})).name(), "dense(bool [2, 2])");
  EXPECT_EQ(Mask::documents(ConstTensor(lengths, {2}), ConstTensor(lengths, {2})).name(),
            "documents(2 queries, 2 keys)");
  const std::vector<int64_t> many(100, 7);
  EXPECT_EQ(Mask::lengths(many).name(), "lengths(7, 7, 7, 7, 7, 7, 7, 7, ...)");
}

TEST(MaskPicture, Svg_HasOneRunPerRow) {
  const int64_t lengths[] = {2};
  const std::string svg =
      (Mask::causal_bottom_right() & Mask::lengths(lengths)).to_svg({1, 1, 2, 3});
  EXPECT_NE(svg.find("viewBox=\"0 0 3 2\""), std::string::npos) << svg;
  EXPECT_NE(svg.find("causal_bottom_right &amp; lengths(2): 2 queries, 3 keys"), std::string::npos)
      << svg;
  EXPECT_NE(svg.find("d=\"M0 0h1v1h-1zM0 1h2v1h-2z\""), std::string::npos) << svg;
}

TEST(MaskPicture, Svg_DrawsHolesAsSeparateRuns) {
  const bool dense[] = {true, false, true, true};
  const std::string svg = Mask::dense(ConstTensor(dense, {1, 4})).to_svg({1, 1, 1, 4});
  EXPECT_NE(svg.find("d=\"M0 0h1v1h-1zM2 0h2v1h-2z\""), std::string::npos) << svg;
}

TEST(MaskPicture, PicturesNobodyCanSee_AreRefused) {
  EXPECT_THROW(Mask::full().to_text({1, 1, 100000, 100000}), Error);
  EXPECT_THROW(Mask::full().to_svg({1, 1, INT64_MAX, INT64_MAX}), Error);
  EXPECT_THROW(Mask::full().to_text({1, 1, 2, 2}, 1, 0), Error);
  EXPECT_THROW(Mask::full().to_text({1, 1, 2, 2}, 0, -1), Error);
}

}  // namespace
}  // namespace qkv
