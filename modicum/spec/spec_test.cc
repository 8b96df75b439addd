#include "modicum/spec/spec.h"

#include <gtest/gtest.h>

#include <set>

#include "modicum/base/base.h"

namespace modicum {
namespace {

TEST(DType, HasTheNamesOfTheFormatAndOfTorchAndItsSize) {
  struct Row {
    DType dtype;
    std::string_view stored;
    std::string_view torch;
    int bits;
  };
  const Row all[] = {
      {DType::boolean, "BOOL", "bool", 8},
      {DType::f4, "F4", "float4_e2m1fn_x2", 4},
      {DType::f6_e2m3, "F6_E2M3", "float6_e2m3", 6},
      {DType::f6_e3m2, "F6_E3M2", "float6_e3m2", 6},
      {DType::u8, "U8", "uint8", 8},
      {DType::i8, "I8", "int8", 8},
      {DType::f8_e5m2, "F8_E5M2", "float8_e5m2", 8},
      {DType::f8_e4m3, "F8_E4M3", "float8_e4m3fn", 8},
      {DType::f8_e8m0, "F8_E8M0", "float8_e8m0fnu", 8},
      {DType::f8_e4m3fnuz, "F8_E4M3FNUZ", "float8_e4m3fnuz", 8},
      {DType::f8_e5m2fnuz, "F8_E5M2FNUZ", "float8_e5m2fnuz", 8},
      {DType::i16, "I16", "int16", 16},
      {DType::u16, "U16", "uint16", 16},
      {DType::f16, "F16", "float16", 16},
      {DType::bf16, "BF16", "bfloat16", 16},
      {DType::i32, "I32", "int32", 32},
      {DType::u32, "U32", "uint32", 32},
      {DType::f32, "F32", "float32", 32},
      {DType::c64, "C64", "complex64", 64},
      {DType::f64, "F64", "float64", 64},
      {DType::i64, "I64", "int64", 64},
      {DType::u64, "U64", "uint64", 64},
  };
  static_assert(std::size(all) == static_cast<size_t>(DType::count));
  for (const Row& row : all) {
    EXPECT_EQ(stored_name(row.dtype), row.stored);
    EXPECT_EQ(torch_name(row.dtype), row.torch);
    EXPECT_EQ(bits_per_element(row.dtype), row.bits) << row.stored;
    EXPECT_EQ(dtype_from_stored_name(row.stored), row.dtype);
    EXPECT_EQ(dtype_from_torch_name(row.torch), row.dtype);
    if (row.bits % 8 == 0) {
      EXPECT_EQ(bytes_per_element(row.dtype), row.bits / 8);
    } else {
      EXPECT_THROW(bytes_per_element(row.dtype), Error) << row.stored;
    }
    const bool has_casts = row.stored == "F32" || row.stored == "F16" || row.stored == "BF16";
    EXPECT_EQ(is_castable(row.dtype), has_casts) << row.stored;
  }
}

TEST(DType, NamesAreExact) {
  for (const char* name : {"", "bf16", "BF16 ", "F8", "FLOAT32", "float32"}) {
    EXPECT_EQ(dtype_from_stored_name(name), std::nullopt) << name;
  }
  EXPECT_EQ(dtype_from_torch_name("fp32"), DType::f32);
  EXPECT_EQ(dtype_from_torch_name("bf16"), DType::bf16);
  EXPECT_EQ(dtype_from_torch_name("fp16"), DType::f16);
  EXPECT_EQ(dtype_from_torch_name("F32"), std::nullopt);
  EXPECT_EQ(dtype_from_torch_name(""), std::nullopt);
}

TEST(Tensor, CountsElementsAndBytes) {
  EXPECT_EQ(numel_of({}), 1);
  EXPECT_EQ(numel_of({2, 3, 4}), 24);
  EXPECT_EQ(numel_of({2, 0}), 0);
  EXPECT_EQ(bytes_of(DType::bf16, 3), 6U);
  EXPECT_EQ(bytes_of(DType::c64, 3), 24U);
  EXPECT_EQ(bytes_of(DType::f4, 6), 3U);
  EXPECT_EQ(bytes_of(DType::f6_e2m3, 4), 3U);
  EXPECT_EQ(bytes_of(DType::u8, int64_t{1} << 62), uint64_t{1} << 62);
  EXPECT_EQ(shape_text({}), "[]");
  EXPECT_EQ(shape_text({2, 3}), "[2, 3]");
  EXPECT_EQ(tensor_text(DType::bf16, {2, 3}), "bfloat16 [2, 3]");
}

TEST(Digest, HexHasAll32Digits) {
  EXPECT_EQ((Digest{0x1, 0xabcdef0123456789}).hex(), "0000000000000001abcdef0123456789");
}

TEST(Manifest, CountsItsDataAndItself) {
  Manifest manifest;
  EXPECT_EQ(manifest.data_bytes(), 0U);
  EXPECT_EQ(manifest.held_bytes(), 0U);
  const std::string long_name(100, 'n');
  manifest.files.push_back({.name = "short"});
  manifest.tensors.push_back({.spec = {.fqn = "w", .shape = {2, 3}}, .at = {0, 0, 24}});
  manifest.tensors.push_back({.spec = {.fqn = long_name, .shape = {}}, .at = {0, 24, 28}});
  EXPECT_EQ(manifest.data_bytes(), 28U);
  // Heap blocks: two dims (16 bytes) take 32; a name of 100 with its terminator takes 112; short
  // names are stored inside std::string.
  EXPECT_EQ(manifest.held_bytes(), sizeof(DataFile) + 2 * sizeof(StoredTensor) + 32 + 112);
}

TEST(HeapBytes, FollowTheAllocatorsGranules) {
  EXPECT_EQ(heap_block_bytes(0), 0U);
  EXPECT_EQ(heap_block_bytes(1), 32U);
  EXPECT_EQ(heap_block_bytes(24), 32U);
  EXPECT_EQ(heap_block_bytes(25), 48U);
  EXPECT_EQ(heap_block_bytes(40), 48U);
  EXPECT_EQ(heap_bytes(std::string(15, 'a')), 0U);
  EXPECT_EQ(heap_bytes(std::string(16, 'a')), 32U);
}

TEST(Footprint, EveryPurposeHasAUniqueName) {
  std::set<std::string_view> names;
  for (size_t i = 0; i < static_cast<size_t>(Purpose::count); ++i) {
    names.insert(purpose_name(static_cast<Purpose>(i)));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(Purpose::count));
  EXPECT_EQ(names.count(""), 0U);
  EXPECT_EQ(purpose_name(Purpose::process), "process");
  EXPECT_EQ(purpose_name(Purpose::staging), "staging");
  EXPECT_EQ(purpose_name(Purpose::snapshot), "snapshot");
}

TEST(Footprint, AddsUpAndCompares) {
  Footprint a;
  EXPECT_EQ(a.total(), 0U);
  a[Purpose::process] = 100;
  a[Purpose::page_tables] = 10;
  a[Purpose::shards] = 1;
  Footprint b;
  b[Purpose::shards] = 2;
  b[Purpose::snapshot] = 4;
  Footprint sum = a;
  sum += b;
  EXPECT_EQ(sum.total(), 117U);
  EXPECT_EQ(sum.ledger_total(), 7U);
  EXPECT_EQ(sum[Purpose::shards], 3U);
  EXPECT_NE(a, b);
}

}  // namespace
}  // namespace modicum
