#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "modicum/checkpoint/test_files_doubles.h"

namespace modicum {
namespace {

using std::literals::operator""s;

constexpr const char* kPath = "/m/model.safetensors";

std::optional<Error> failure_of(const std::string& bytes) {
  MemoryFileSystem files;
  files.put(kPath, bytes);
  return failure(files, kPath);
}

Manifest manifest_of(const std::string& bytes) {
  MemoryFileSystem files;
  files.put(kPath, bytes);
  return open_checkpoint(files, kPath).manifest;
}

std::string prefix(uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i));
  return bytes;
}

// The text of a header with one tensor, "t". The arguments are JSON values.
std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return fmt::format(R"({{"t":{{"dtype":{},"shape":{},"data_offsets":{}}}}})", dtype, shape,
                     offsets);
}
std::string u8(const std::string& shape, const std::string& offsets) {
  return entry("\"U8\"", shape, offsets);
}
// The member of a header for a tensor of bytes at data_offsets [begin, end).
std::string member(const std::string& name, uint64_t begin, uint64_t end) {
  return fmt::format(R"("{}":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}})", name,
                     end - begin, begin, end);
}
std::string object(const std::string& members) { return "{" + members + "}"; }

struct InvalidFile {
  std::string what;
  std::string bytes;
  Category category;
  std::string tensor = "";
};

void expect_refused(const std::vector<InvalidFile>& cases) {
  for (const InvalidFile& bad : cases) {
    const auto error = failure_of(bad.bytes);
    ASSERT_TRUE(error) << bad.what;
    EXPECT_EQ(category_name(error->category()), category_name(bad.category))
        << bad.what << ": " << error->what();
    EXPECT_EQ(error->facts().file, "model.safetensors") << bad.what;
    EXPECT_EQ(error->facts().tensor, bad.tensor) << bad.what << ": " << error->what();
    EXPECT_EQ(std::string(error->what()).find('\n'), std::string::npos) << bad.what;
  }
}

TEST(Safetensors, InvalidLengthPrefixesAreRefused) {
  expect_refused({
      {"empty file", "", Category::format_trunc},
      {"7 bytes", "\x02\0\0\0\0\0\0"s, Category::format_trunc},
      {"header cut", prefix(3) + "{}", Category::format_trunc},
      {"no header", prefix(2), Category::format_trunc},
      {"100,000,001 bytes", prefix(100000001) + "{}", Category::format_limit},
      {"all ones", prefix(~uint64_t{0}) + "{}", Category::format_limit},
      {"zip", "PK\x03\x04" + std::string(100, 'x'), Category::format_limit},
      {"0 bytes", prefix(0), Category::format_header},
      {"1 byte", prefix(1) + "{", Category::format_header},
  });
}

TEST(Safetensors, HeadersOtherThanAJsonObjectAreRefused) {
  expect_refused({
      {"BOM", file_bytes("\xEF\xBB\xBF{}", 0), Category::format_header},
      {"array", file_bytes("[]", 0), Category::format_header},
      {"zeros", file_bytes("\0\0\0\0"s, 0), Category::format_header},
      {"spaces", file_bytes("    ", 0), Category::format_header},
      {"text", file_bytes("\"{}\"", 0), Category::format_header},
      {"stray byte", file_bytes("{\"a\xff\":1}", 0), Category::format_utf8},
      {"overlong", file_bytes("{\"a\xc0\x80\":1}", 0), Category::format_utf8},
      {"surrogate", file_bytes("{\"\xed\xa0\x80\":1}", 0), Category::format_utf8},
      {"UTF-8 before {", file_bytes("\xff{}", 0), Category::format_utf8},
      {"no end", file_bytes("{\"a\":", 0), Category::format_json},
      {"zero padding", file_bytes("{}\0\0"s, 0), Category::format_json},
      {"two documents", file_bytes("{}{}", 0), Category::format_json},
      {"lone surrogate", file_bytes("{\"\\ud800\":1}", 0), Category::format_json},
      {"raw control byte", file_bytes("{\"a\tb\":1}", 0), Category::format_json},
      {"trailing comma", file_bytes(object(member("t", 0, 1) + ","), 1), Category::format_json},
      {"leading zero", file_bytes(u8("[01]", "[0,1]"), 1), Category::format_json},
      {"NaN", file_bytes(u8("[NaN]", "[0,1]"), 1), Category::format_json},
      {"nesting", file_bytes("{\"a\":" + std::string(100000, '['), 0), Category::format_json},
      {"invalid JSON after a schema fault", file_bytes("{\"a\":1,]", 0), Category::format_json},
  });
}

TEST(Safetensors, DuplicatesAreRefused) {
  const std::string same = R"("dtype":"U8","shape":[1],"data_offsets":[0,1])";
  expect_refused({
      {"name", file_bytes(object(member("t", 0, 1) + "," + member("t", 1, 2)), 2),
       Category::format_dup},
      {"escaped name", file_bytes(object(member("a", 0, 1) + "," + member("\\u0061", 1, 2)), 2),
       Category::format_dup},
      {"metadata", file_bytes(R"({"__metadata__":{},"__metadata__":{}})", 0), Category::format_dup},
      {"metadata key", file_bytes(R"({"__metadata__":{"a":"1","a":"1"}})", 0),
       Category::format_dup},
      {"entry key", file_bytes("{\"t\":{" + same + ",\"dtype\":\"U8\"}}", 1), Category::format_dup},
      {"escaped entry key", file_bytes("{\"t\":{" + same + ",\"\\u0064type\":\"U8\"}}", 1),
       Category::format_dup},
  });
}

TEST(Safetensors, InvalidEntriesAreRefused) {
  const std::string dims65 = [] {
    std::string dims = "[1";
    for (int i = 0; i < 64; ++i) dims += ",1";
    return dims + "]";
  }();
  const auto schema = Category::format_schema;
  const auto metadata = [](const std::string& value) {
    return file_bytes("{\"__metadata__\":" + value + "}", 0);
  };
  expect_refused({
      {"metadata null", metadata("null"), schema, "__metadata__"},
      {"metadata array", metadata("[]"), schema, "__metadata__"},
      {"metadata number", metadata("{\"a\":1}"), schema, "__metadata__"},
      {"metadata nested", metadata("{\"a\":{}}"), schema, "__metadata__"},
      {"metadata null value", metadata("{\"a\":null}"), schema, "__metadata__"},
      {"entry null", file_bytes("{\"t\":null}", 0), schema, "t"},
      {"entry array", file_bytes("{\"t\":[\"U8\",[1],[0,1]]}", 1), schema, "t"},
      {"entry number", file_bytes("{\"t\":1}", 0), schema, "t"},
      {"empty entry", file_bytes("{\"t\":{}}", 0), schema, "t"},
      {"no dtype", file_bytes(R"({"t":{"shape":[1],"data_offsets":[0,1]}})", 1), schema, "t"},
      {"no shape", file_bytes(R"({"t":{"dtype":"U8","data_offsets":[0,1]}})", 1), schema, "t"},
      {"no offsets", file_bytes(R"({"t":{"dtype":"U8","shape":[1]}})", 1), schema, "t"},
      {"extra key", file_bytes(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":0}})", 1),
       schema, "t"},
      {"key in capitals", file_bytes(R"({"t":{"DType":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
       schema, "t"},
      {"dtype number", file_bytes(entry("1", "[1]", "[0,1]"), 1), schema, "t"},
      {"dtype object", file_bytes(entry("{\"F32\":null}", "[1]", "[0,4]"), 4), schema, "t"},
      {"dtype in lower case", file_bytes(entry("\"f32\"", "[1]", "[0,4]"), 4),
       Category::format_dtype, "t"},
      {"dtype unknown", file_bytes(entry("\"F128\"", "[1]", "[0,16]"), 16), Category::format_dtype,
       "t"},
      {"dtype empty", file_bytes(entry("\"\"", "[1]", "[0,4]"), 4), Category::format_dtype, "t"},
      {"shape number", file_bytes(u8("1", "[0,1]"), 1), schema, "t"},
      {"shape null", file_bytes(u8("null", "[0,1]"), 1), schema, "t"},
      {"dim negative", file_bytes(u8("[-1]", "[0,1]"), 1), schema, "t"},
      {"dim minus zero", file_bytes(u8("[-0]", "[0,0]"), 0), schema, "t"},
      {"dim fraction", file_bytes(u8("[1.0]", "[0,1]"), 1), schema, "t"},
      {"dim exponent", file_bytes(u8("[1e0]", "[0,1]"), 1), schema, "t"},
      {"dim text", file_bytes(u8("[\"1\"]", "[0,1]"), 1), schema, "t"},
      {"dim true", file_bytes(u8("[true]", "[0,1]"), 1), schema, "t"},
      {"dim nested", file_bytes(u8("[[1]]", "[0,1]"), 1), schema, "t"},
      {"65 dims", file_bytes(u8(dims65, "[0,1]"), 1), schema, "t"},
      {"one offset", file_bytes(u8("[1]", "[1]"), 1), schema, "t"},
      {"empty offsets", file_bytes(u8("[1]", "[]"), 1), schema, "t"},
      {"three offsets", file_bytes(u8("[1]", "[0,1,1]"), 1), schema, "t"},
      {"negative offset", file_bytes(u8("[1]", "[-1,0]"), 1), schema, "t"},
      {"negative pair", file_bytes(u8("[0]", "[-2,-2]"), 0), schema, "t"},
      {"fraction in an offset", file_bytes(u8("[1]", "[0,1.0]"), 1), schema, "t"},
      {"offsets object", file_bytes(u8("[1]", "{\"0\":0}"), 1), schema, "t"},
  });
}

TEST(Safetensors, InvalidNamesAreRefused) {
  const std::string longest(4096, 'n');
  expect_refused({
      {"empty", file_bytes(object(member("", 0, 1)), 1), Category::format_name, ""},
      {"NUL", file_bytes(object(member("a\\u0000b", 0, 1)), 1), Category::format_name, "a\0b"s},
      {"newline", file_bytes(object(member("a\\nb", 0, 1)), 1), Category::format_name, "a\nb"},
      {"DEL", file_bytes(object(member("a\x7f", 0, 1)), 1), Category::format_name, "a\x7f"},
      {"4097 bytes", file_bytes(object(member(longest + "n", 0, 1)), 1), Category::format_name,
       longest + "n"},
  });
  EXPECT_FALSE(failure_of(file_bytes(object(member(longest, 0, 1)), 1)));
}

TEST(Safetensors, InvalidSizesAreRefused) {
  const auto overflow = Category::format_overflow;
  expect_refused({
      {"dim of 2^63", file_bytes(u8("[9223372036854775808]", "[0,1]"), 1), overflow, "t"},
      {"dim of 2^64", file_bytes(u8("[18446744073709551616]", "[0,0]"), 0), overflow, "t"},
      {"offset of 2^63", file_bytes(u8("[1]", "[0,9223372036854775808]"), 1), overflow, "t"},
      {"product", file_bytes(u8("[4294967296,4294967296]", "[0,0]"), 0), overflow, "t"},
      {"product before a zero", file_bytes(u8("[4294967296,4294967296,0]", "[0,0]"), 0), overflow,
       "t"},
      {"bytes", file_bytes(entry("\"F32\"", "[4611686018427387904]", "[0,0]"), 0), overflow, "t"},
      {"bytes of 2^63", file_bytes(entry("\"F64\"", "[1152921504606846976]", "[0,0]"), 0), overflow,
       "t"},
      {"half a byte", file_bytes(entry("\"F4\"", "[3]", "[0,1]"), 1), Category::format_align, "t"},
      {"6 bits", file_bytes(entry("\"F6_E2M3\"", "[2]", "[0,1]"), 1), Category::format_align, "t"},
      {"backwards", file_bytes(u8("[1]", "[1,0]"), 1), Category::format_offsets, "t"},
      {"too few bytes", file_bytes(u8("[2]", "[0,1]"), 1), Category::format_size, "t"},
      {"too many bytes", file_bytes(u8("[1]", "[0,2]"), 2), Category::format_size, "t"},
      {"wrong width", file_bytes(entry("\"F32\"", "[1]", "[0,2]"), 2), Category::format_size, "t"},
      {"2^62 bytes", file_bytes(u8("[4611686018427387904]", "[0,4611686018427387904]"), 1),
       Category::format_trunc, "t"},
  });
}

TEST(Safetensors, HolesAndOverlapsAreRefused) {
  const auto two = [](uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return object(member("a", a, b) + "," + member("b", c, d));
  };
  expect_refused({
      {"overlap", file_bytes(two(0, 4, 3, 6), 6), Category::format_overlap, "b"},
      {"alias", file_bytes(two(0, 4, 0, 4), 4), Category::format_overlap, "b"},
      {"inside", file_bytes(two(0, 4, 1, 3), 4), Category::format_overlap, "b"},
      {"empty one inside", file_bytes(two(0, 4, 2, 2), 4), Category::format_overlap, "b"},
      {"hole", file_bytes(two(0, 2, 3, 5), 5), Category::format_hole, "b"},
      {"hole at the start", file_bytes(two(1, 2, 2, 3), 3), Category::format_hole, "a"},
      {"hole before an empty one", file_bytes(two(0, 2, 3, 3), 3), Category::format_hole, "b"},
      {"one byte more", file_bytes(two(0, 2, 2, 4), 5), Category::format_trailing},
      {"data without tensors", file_bytes("{}", 1), Category::format_trailing},
      {"one byte less", file_bytes(two(0, 2, 2, 4), 3), Category::format_trunc, "b"},
      {"no data", file_bytes(two(0, 2, 2, 4), 0), Category::format_trunc, "a"},
  });
}

TEST(Safetensors, ErrorsGiveOffsetExpectedAndGot) {
  const auto json = failure_of(file_bytes("{\"a\":nil}", 0));
  EXPECT_EQ(json->facts().offset, 8U + 5U);
  const auto size = failure_of(file_bytes(u8("[7]", "[0,5]"), 5));
  EXPECT_EQ(size->facts().expected, "7 bytes");
  EXPECT_EQ(size->facts().got, "[0, 5]");
  const auto cut = failure_of(file_bytes(u8("[7]", "[0,7]"), 5));
  EXPECT_EQ(cut->facts().expected, "7 bytes of data");
  EXPECT_EQ(cut->facts().got, "5 bytes of data");
  const auto name = failure_of(file_bytes(object(member("a\\nb", 0, 1)), 1));
  EXPECT_EQ(name->facts().got, "a control byte");
}

TEST(Safetensors, ValidFilesAreAccepted) {
  const std::string header = object(member("t", 0, 3));
  const std::vector<std::pair<std::string, std::string>> controls = {
      {"one tensor", file_bytes(header, 3)},
      {"no tensor", file_bytes("{}", 0)},
      {"0-d", file_bytes(entry("\"F32\"", "[]", "[0,4]"), 4)},
      {"empty", file_bytes(entry("\"F32\"", "[2,0]", "[0,0]"), 0)},
      {"empty between two",
       file_bytes(object(member("a", 0, 2) + "," + member("b", 2, 2) + "," + member("c", 2, 4)),
                  4)},
      {"space-padded", file_bytes(header + "      ", 3)},
      {"padded with every white space", file_bytes(header + " \t\r\n", 3)},
      {"metadata", file_bytes(R"({"__metadata__":{"format":"pt"},)" + header.substr(1), 3)},
      {"empty metadata", file_bytes(R"({"__metadata__":{}})", 0)},
      {"out of order", file_bytes(object(member("b", 2, 4) + "," + member("a", 0, 2)), 4)},
      {"even F4", file_bytes(entry("\"F4\"", "[2,3]", "[0,3]"), 3)},
      {"F6 in fours", file_bytes(entry("\"F6_E3M2\"", "[4]", "[0,3]"), 3)},
      {"F32 at an odd offset",
       file_bytes(object(member("a", 0, 1) + R"(,"b":{"dtype":"F32","shape":[1],)" +
                         R"("data_offsets":[1,5]})"),
                  5)},
      {"two empties at 0", file_bytes(object(member("a", 0, 0) + "," + member("b", 0, 0)), 0)},
      {"[0, 2^62]", file_bytes(u8("[0,4611686018427387904]", "[0,0]"), 0)},
      {"name that is not ASCII", file_bytes(object(member("\u00e9\u20ac", 0, 3)), 3)},
      {"leading white space", file_bytes(" \n" + header, 3)},
      {"escaped name", file_bytes(object(member("\\u0074\\/", 0, 3)), 3)},
      {"keys in any order",
       file_bytes(R"({"t":{"data_offsets":[0,1],"shape":[1],"dtype":"U8"}})", 1)},
  };
  for (const auto& [what, bytes] : controls) {
    const auto error = failure_of(bytes);
    EXPECT_FALSE(error) << what << ": " << error->what();
  }
}

TEST(Safetensors, EachDtypeIsAccepted) {
  for (int i = 0; i < static_cast<int>(DType::count); ++i) {
    const auto dtype = static_cast<DType>(i);
    const uint64_t bytes = bytes_of(dtype, 8);
    const Manifest manifest = manifest_of(file_bytes(
        entry(fmt::format("\"{}\"", stored_name(dtype)), "[8]", fmt::format("[0,{}]", bytes)),
        bytes));
    ASSERT_EQ(manifest.tensors.size(), 1U);
    EXPECT_EQ(manifest.tensors[0].spec.dtype, dtype);
    EXPECT_EQ(manifest.tensors[0].at.bytes(), bytes);
  }
}

TEST(Safetensors, TheLongestHeaderIsAcceptedAndOneByteMoreIsNot) {
  std::string header = object(member("t", 0, 1));
  header.resize(100'000'000, ' ');
  EXPECT_FALSE(failure_of(file_bytes(header, 1)));
  header += ' ';
  EXPECT_EQ(failure_of(file_bytes(header, 1))->category(), Category::format_limit);
}

TEST(Safetensors, TensorsAreSortedByOffset) {
  const std::string bytes =
      file_bytes(object(member("c", 2, 4) + "," + member("b", 2, 2) + "," + member("a", 0, 2)), 4);
  const Manifest manifest = manifest_of(bytes);
  ASSERT_EQ(manifest.tensors.size(), 3U);
  EXPECT_EQ(manifest.tensors[0].spec.fqn, "a");
  EXPECT_EQ(manifest.tensors[1].spec.fqn, "b");
  EXPECT_EQ(manifest.tensors[2].spec.fqn, "c");
  EXPECT_EQ(manifest.tensors[2].spec.shape, std::vector<int64_t>{2});
  EXPECT_EQ(manifest.files.at(0).header_bytes, bytes.size() - 4);
  EXPECT_EQ(manifest.tensors[0].at.begin, bytes.size() - 4);
  EXPECT_EQ(manifest.tensors[2].at.end, bytes.size());
  EXPECT_EQ(manifest.data_bytes(), 4U);
}

// Expects FORMAT.* (exit code 10), or a manifest whose tensors tile the data.
void expect_error_or_tiling(const std::string& bytes) {
  MemoryFileSystem files;
  files.put(kPath, bytes);
  try {
    const Manifest manifest = open_checkpoint(files, kPath).manifest;
    uint64_t end = manifest.files.at(0).header_bytes;
    for (const StoredTensor& stored : manifest.tensors) {
      ASSERT_EQ(stored.at.begin, end);
      end = stored.at.end;
    }
    ASSERT_EQ(end, bytes.size());
  } catch (const Error& error) {
    ASSERT_EQ(exit_code(error.category()), 10) << error.what();
  }
}

TEST(Safetensors, TruncationsAndMutationsAreErrorsOrValid) {
  const std::string bytes = file_bytes(
      R"({"__metadata__":{"format":"pt"},"a.b":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
      R"("\u00e9":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}  )",
      9);
  ASSERT_FALSE(failure_of(bytes));
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_TRUE(failure_of(bytes.substr(0, length))) << length;
  }
  for (size_t at = 0; at < bytes.size() - 9; ++at) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string mutated = bytes;
      mutated[at] = static_cast<char>(byte);
      expect_error_or_tiling(mutated);
    }
  }
}

}  // namespace
}  // namespace modicum
