#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "modicum/kernels/adamw_reference_double.h"
#include "modicum/kernels/held_span_double.h"

namespace modicum {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

// `values` in `dtype`, one byte past alignment.
HeldPlane plane_of(const std::vector<float>& values, DType dtype) {
  const auto n = static_cast<int64_t>(values.size());
  HeldPlane plane(n * bits_per_element(dtype) / 8, 1);
  cast(reinterpret_cast<const std::byte*>(values.data()), DType::f32, plane.data(), dtype, n);
  return plane;
}

TEST(Squares, EqualTheReferenceOnEveryInstructionSet) {
  std::vector<int64_t> lengths = {2048, 2049, 9999};
  for (int64_t n = 0; n < 200; ++n) lengths.push_back(n);
  for (const std::string_view isa : isas()) {
    use_isa(isa);
    for (const DType dtype : kDTypes) {
      for (const int64_t n : lengths) {
        HeldPlane plane = plane_of(spread_values(4, n), dtype);
        const GradNorm expected = reference_squares(plane.data(), dtype, n);
        const GradNorm got = squares(plane.data(), dtype, n);
        EXPECT_EQ(got.sum_of_squares, expected.sum_of_squares) << isa << ", " << n;
        EXPECT_TRUE(got.finite);
      }
    }
  }
  use_isa(isas().front());
}

TEST(Squares, ANonFiniteElementIsFlaggedAtAnyPlace) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const DType dtype : kDTypes) {
    for (const float bad : {infinity, -infinity, std::nanf("")}) {
      for (const size_t at : {size_t{0}, size_t{40}, size_t{98}}) {
        std::vector<float> values(99, 1.0F);
        values[at] = bad;
        HeldPlane plane = plane_of(values, dtype);
        const GradNorm got = squares(plane.data(), dtype, 99);
        EXPECT_FALSE(got.finite);
        EXPECT_EQ(got.sum_of_squares, 0.0);
      }
    }
  }
}

TEST(Squares, TheLargestFloatsHaveAFiniteSum) {
  const float largest = std::numeric_limits<float>::max();
  HeldPlane plane = plane_of(std::vector<float>(1000, largest), DType::f32);
  const GradNorm got = squares(plane.data(), DType::f32, 1000);
  EXPECT_TRUE(got.finite);
  EXPECT_DOUBLE_EQ(got.sum_of_squares,
                   1000.0 * static_cast<double>(largest) * static_cast<double>(largest));
}

}  // namespace
}  // namespace modicum
