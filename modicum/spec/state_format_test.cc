#include "modicum/spec/state_format.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "modicum/base/base.h"

namespace modicum {
namespace {

using Shape = std::vector<int64_t>;

TEST(ScaleBlocks, LieWithinRows) {
  for (const int64_t row : {0, 1, 100, 127, 128, 129, 300, 384, 1000}) {
    const ScaleBlocks blocks(row);
    int64_t block = -1;
    int64_t begin = 0;
    for (int64_t i = 0; i < 3000; ++i) {
      const int64_t in_row = row == 0 ? i : i % row;
      if (in_row % kScaleBlock == 0) {
        ++block;
        begin = i;
      }
      ASSERT_EQ(blocks.block_of(i), block) << "element " << i << ", rows of " << row;
      ASSERT_EQ(blocks.begin_of(i), begin) << "element " << i << ", rows of " << row;
      const int64_t edge = blocks.edge_after(i);
      ASSERT_EQ(blocks.begin_of(edge), edge) << "element " << i << ", rows of " << row;
      ASSERT_TRUE(edge == i || blocks.begin_of(edge - 1) == begin) << "element " << i;
    }
  }
}

TEST(StateFormatOf, TheMasterDependsOnTheParametersDtype) {
  const auto name_of = [](DType dtype, const Shape& shape, const char* asked) {
    return row_of(state_format_of(dtype, shape, state_format_named(asked).format)).name;
  };
  const Shape matrix = {4096, 512};
  for (const StateFormatRow& row : state_formats()) {
    EXPECT_EQ(name_of(DType::bf16, matrix, row.name.data()), row.name);
  }
  for (const DType dtype : {DType::f32, DType::f16}) {
    EXPECT_EQ(name_of(dtype, matrix, "fp32"), "fp32");
    EXPECT_EQ(name_of(dtype, matrix, "fp32-split"), "fp32");
    EXPECT_EQ(name_of(dtype, matrix, "bf16-moments"), "bf16-moments-fp32");
    EXPECT_EQ(name_of(dtype, matrix, "int8-moments"), "int8-moments-fp32");
    EXPECT_EQ(name_of(dtype, matrix, "int8-moments-24"), "int8-moments-fp32");
  }
  for (const Shape& shape : {Shape{}, Shape{1 << 20}, Shape{8192, 64}, Shape{16, 255}}) {
    EXPECT_EQ(name_of(DType::bf16, shape, "int8-moments"), "fp32-split");
    EXPECT_EQ(name_of(DType::bf16, shape, "int8-moments-24"), "fp32-split");
    EXPECT_EQ(name_of(DType::f32, shape, "int8-moments"), "fp32");
    EXPECT_EQ(name_of(DType::bf16, shape, "bf16-moments"), "bf16-moments");
  }
}

TEST(BytesPerParameter, AreThoseOfTheFormats) {
  const auto bytes = [](DType dtype, const char* asked, bool on_device = false) {
    const StateFormat format =
        state_format_of(dtype, Shape{4096, 512}, state_format_named(asked).format);
    return bytes_per_parameter(dtype, row_of(format), on_device);
  };
  EXPECT_EQ(bytes(DType::f32, "fp32"), 16);
  EXPECT_EQ(bytes(DType::f32, "bf16-moments"), 12);
  EXPECT_EQ(bytes(DType::f32, "int8-moments"), 10.0625);
  EXPECT_EQ(bytes(DType::bf16, "fp32"), 18);
  EXPECT_EQ(bytes(DType::bf16, "fp32-split"), 14);
  EXPECT_EQ(bytes(DType::bf16, "bf16-moments"), 10);
  EXPECT_EQ(bytes(DType::bf16, "int8-moments"), 8.0625);
  EXPECT_EQ(bytes(DType::bf16, "int8-moments-24"), 7.0625);
  EXPECT_EQ(bytes(DType::f16, "fp32-split"), 18);
  // On a device the parameter is no master, so the host holds one.
  EXPECT_EQ(bytes(DType::f32, "fp32", true), 16);
  EXPECT_EQ(bytes(DType::bf16, "fp32", true), 16);
  EXPECT_EQ(bytes(DType::bf16, "fp32-split", true), 14);
}

TEST(StateFormatOf, DerivedFormatsCantBeRequested) {
  for (const StateFormatRow& row : all_state_formats().subspan(state_formats().size())) {
    EXPECT_THROW(state_format_named(row.name), Error) << row.name;
  }
}

TEST(MomentRow, IsTheLeastTrailingProductOfABlockOrMore) {
  EXPECT_EQ(moment_row(Shape{4096, 14336}), 14336);
  EXPECT_EQ(moment_row(Shape{8, 512, 100}), 51200);
  EXPECT_EQ(moment_row(Shape{64, 3, 7, 7}), 147);
  EXPECT_EQ(moment_row(Shape{32, 128}), 128);
  EXPECT_EQ(moment_row(Shape{31, 128}), 0);
  EXPECT_EQ(moment_row(Shape{8192, 127}), 0);
  EXPECT_EQ(moment_row(Shape{1 << 20}), 0);
  EXPECT_EQ(moment_row(Shape{0, 4096}), 0);
}

}  // namespace
}  // namespace modicum
