// Sums of a rank that are damaged or of another save.
#include "modicum/stream/sums.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "modicum/base/base.h"

namespace modicum {
namespace {

constexpr uint64_t kPoint = 0x1234'5678'9abc;

// Catches: an index from the file that is used without a check; sums that are accepted although one
// bit differs. The sums have no digest of their own, so flipped digests show only when the
// checkpoint is read.
TEST(ChunkSums, AnyDamageIsAnError) {
  const Manifest manifest = output_manifest(
      {{{"v", Role::param, DType::u8, {3}}, {"w", Role::param, DType::u8, {9 << 20}}}});
  ChunkSums whole(manifest, kPoint);
  const std::vector<std::byte> values(9 << 20, std::byte{5});
  whole.add(0, 0, std::span(values).first(manifest.tensors[0].at.bytes()));
  whole.add(1, 0, std::span(values).first(manifest.tensors[1].at.bytes()));
  const std::vector<std::byte> good = whole.bytes();
  ASSERT_EQ(good.size(), whole.most_bytes());
  std::mt19937_64 random(1);
  for (int i = 0; i < 10'000; ++i) {
    std::vector<std::byte> sums = good;
    if (i % 3 == 0) {
      sums.resize(random() % good.size());
    } else {
      const size_t entry = random() % (good.size() / 40) * 40;
      const size_t at = entry + random() % 24;  // not in the last 16 bytes, the sums of values
      const auto was = sums[at];
      sums[at] = static_cast<std::byte>(random());
      if (sums[at] == was) continue;
    }
    try {
      ChunkSums merged(manifest, kPoint);
      merged.merge(sums);
      merged.prove();
      FAIL() << "mutant " << i << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), Category::integrity) << error.what();
    }
  }
}

}  // namespace
}  // namespace modicum
