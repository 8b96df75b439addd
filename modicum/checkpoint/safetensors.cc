#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

constexpr size_t kLongestName = 4096;
constexpr size_t kMostDims = 64;
constexpr auto kLargest = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());

Facts facts_of(const std::string& file, std::string_view tensor = {}) {
  Facts facts;
  facts.file = file;
  facts.tensor = tensor;
  return facts;
}

// R2: how long the header says it is.
uint64_t read_length(File& file, uint64_t size_bytes) {
  Facts facts = facts_of(file.name());
  if (size_bytes < kLengthPrefix) {
    facts.expected = "8 bytes at least";
    facts.got = fmt::format("{} bytes", size_bytes);
    fail(Category::format_trunc, "the file ends inside its length prefix", facts);
  }
  std::array<std::byte, kLengthPrefix> prefix{};
  file.read(prefix, 0);
  uint64_t length = 0;
  for (size_t i = 0; i < prefix.size(); ++i) length |= static_cast<uint64_t>(prefix[i]) << (8 * i);
  facts.got = fmt::format("{} bytes", length);
  if (length > kLargestHeader) {
    facts.expected = fmt::format("{} bytes at most", kLargestHeader);
    fail(Category::format_limit, "the header is too long", facts);
  }
  if (length > size_bytes - kLengthPrefix) {
    facts.expected = fmt::format("{} bytes at most", size_bytes - kLengthPrefix);
    fail(Category::format_trunc, "the file ends inside its header", facts);
  }
  if (length < 2) {
    facts.expected = "2 bytes at least";
    fail(Category::format_header, "the header is too short", facts);
  }
  return length;
}

bool begins_with_brace(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && text[first] == '{';
}

// An integer of a legal form at `offset`, so that it can only have been too large.
bool is_plain_integer(std::string_view text, uint64_t offset) {
  const std::string_view number = text.substr(offset);
  const size_t end = number.find_first_not_of("0123456789");
  return end != 0 && (end == std::string_view::npos ||
                      std::string_view(".eE").find(number[end]) == std::string_view::npos);
}

// The schema of a header (R8 to R12) over a text that is known to be JSON without duplicates.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, Header& header, uint32_t file_index)
      : text_(text), header_(header), file_index_(file_index) {}

  void parse();

 private:
  size_t prove_json();
  void member(std::string_view name, JsonValue& value);
  void metadata(JsonValue& value);
  void entry(JsonValue& value);
  void integers(JsonValue& value, size_t most, std::string_view what);
  [[noreturn]] void refuse(Category category, const std::string& what, uint64_t offset) const;

  std::string_view text_;
  Header& header_;
  uint32_t file_index_;
  std::string tensor_;             // whose entry is being read
  std::vector<int64_t> integers_;  // of the array read last
};

void HeaderParser::refuse(Category category, const std::string& what, uint64_t offset) const {
  Facts facts = facts_of(header_.file.name, tensor_);
  facts.offset = kLengthPrefix + offset;
  fail(category, what, facts);
}

// R4 to R7. Two passes: JSON that is wrong anywhere wins over a schema that is wrong before it, and
// the count lets the tensors be stored in a vector of exactly their size.
size_t HeaderParser::prove_json() {
  size_t tensors = 0;
  try {
    read_json(text_, [&tensors](JsonValue& root) {
      if (root.kind() != JsonValue::Kind::object) return;
      root.object([&tensors](std::string_view name, JsonValue&) {
        if (name != kMetadataKey) ++tensors;
      });
    });
  } catch (const JsonError& error) {
    if (error.fault == JsonFault::utf8) refuse(Category::format_utf8, error.what(), error.offset);
    if (!begins_with_brace(text_)) refuse(Category::format_header, "no { at the start", 0);
    const bool duplicate = error.fault == JsonFault::duplicate;
    refuse(duplicate ? Category::format_dup : Category::format_json, error.what(), error.offset);
  }
  if (!begins_with_brace(text_)) refuse(Category::format_header, "no { at the start", 0);
  return tensors;
}

void HeaderParser::parse() {
  header_.tensors.reserve(prove_json());
  try {
    reread_json(text_, [this](JsonValue& root) {
      root.object([this](std::string_view name, JsonValue& value) { member(name, value); });
    });
  } catch (const JsonError& error) {
    const bool large = error.fault == JsonFault::range && is_plain_integer(text_, error.offset);
    refuse(large ? Category::format_overflow : Category::format_schema, error.what(), error.offset);
  }
}

void HeaderParser::member(std::string_view name, JsonValue& value) {
  tensor_ = name;
  if (name == kMetadataKey) return metadata(value);
  prove_name(name, header_.file.name);
  entry(value);
}

void HeaderParser::metadata(JsonValue& value) {
  value.object([this](std::string_view key, JsonValue& text) {
    header_.metadata.emplace(key, text.string());
  });
}

void HeaderParser::integers(JsonValue& value, size_t most, std::string_view what) {
  const uint64_t begin = value.offset();
  integers_.clear();
  value.array([&](JsonValue& element) {
    if (integers_.size() == most) {
      refuse(Category::format_schema, fmt::format("{} has over {} numbers", what, most), begin);
    }
    integers_.push_back(element.integer());
  });
}

void HeaderParser::entry(JsonValue& value) {
  const uint64_t begin = value.offset();
  Stored stored;
  int dtypes = 0;
  int shapes = 0;
  int offsets = 0;
  value.object([&](std::string_view key, JsonValue& field) {
    const uint64_t at = field.offset();
    if (key == "dtype") {
      ++dtypes;
      const std::string name = field.string();
      const auto dtype = dtype_from_stored_name(name);
      if (!dtype) refuse(Category::format_dtype, "unknown dtype " + printable(name), at);
      stored.spec.dtype = *dtype;
    } else if (key == "shape") {
      ++shapes;
      integers(field, kMostDims, "shape");
      stored.spec.shape.assign(integers_.begin(), integers_.end());
    } else if (key == "data_offsets") {
      ++offsets;
      integers(field, 2, "data_offsets");
      if (integers_.size() != 2) refuse(Category::format_schema, "two data_offsets are due", at);
      stored.at.begin = static_cast<uint64_t>(integers_[0]);
      stored.at.end = static_cast<uint64_t>(integers_[1]);
    } else {
      refuse(Category::format_schema, "unknown key " + printable(key), at);
    }
  });
  if (dtypes + shapes + offsets != 3) {
    const char* const missing = dtypes == 0 ? "dtype" : shapes == 0 ? "shape" : "data_offsets";
    refuse(Category::format_schema, fmt::format("no {}", missing), begin);
  }
  stored.spec.fqn = std::string(tensor_);  // an assignment would reserve more than it needs
  stored.at.file = file_index_;
  header_.tensors.push_back(std::move(stored));
}

// R12 to R14.
void prove_arithmetic(const Header& header) {
  for (const Stored& stored : header.tensors) {
    const uint64_t bytes = proven_bytes(stored.spec, header.file.name);
    const auto [begin, end] = std::pair(stored.at.begin, stored.at.end);
    Facts facts = facts_of(header.file.name, stored.spec.fqn);
    facts.got = fmt::format("[{}, {}]", begin, end);
    if (begin > end) fail(Category::format_offsets, "data_offsets run backwards", facts);
    if (end - begin == bytes) continue;
    facts.expected = fmt::format("{} bytes", bytes);
    fail(Category::format_size, "data_offsets do not fit dtype and shape", facts);
  }
}

// R15, R16: in order, the tensors tile the data without gap or overlap, from its start to its end.
void prove_layout(const Header& header, uint64_t data_bytes) {
  uint64_t end = 0;
  const Stored* previous = nullptr;
  for (const Stored& stored : header.tensors) {
    Facts facts = facts_of(header.file.name, stored.spec.fqn);
    facts.offset = header.file.header_bytes + stored.at.begin;
    facts.expected = fmt::format("begin {}", end);
    facts.got = fmt::format("begin {}", stored.at.begin);
    if (stored.at.begin < end) {
      fail(Category::format_overlap,
           fmt::format("the tensor overlaps {}", printable(previous->spec.fqn)), facts);
    }
    if (stored.at.begin > end) fail(Category::format_hole, "a hole before the tensor", facts);
    end = stored.at.end;
    previous = &stored;
    if (end <= data_bytes) continue;
    facts.offset = header.file.identity.size_bytes;
    facts.expected = fmt::format("{} bytes of data", header.tensors.back().at.end);
    facts.got = fmt::format("{} bytes of data", data_bytes);
    fail(Category::format_trunc, "the file ends before the tensor does", facts);
  }
  if (end == data_bytes) return;
  Facts facts = facts_of(header.file.name);
  facts.offset = header.file.header_bytes + end;
  facts.expected = fmt::format("{} bytes of data", end);
  facts.got = fmt::format("{} bytes of data", data_bytes);
  fail(Category::format_trailing, "bytes after the last tensor", facts);
}

void sort_by_place(std::vector<Stored>& tensors) {
  const auto before = [](const Stored& a, const Stored& b) {
    return std::tie(a.at.begin, a.at.end, a.spec.fqn) < std::tie(b.at.begin, b.at.end, b.spec.fqn);
  };
  if (std::is_sorted(tensors.begin(), tensors.end(), before)) return;
  std::sort(tensors.begin(), tensors.end(), before);
  // Strings that were moved about keep each other's larger buffers.
  for (Stored& stored : tensors) stored.spec.fqn.shrink_to_fit();
}

}  // namespace

void prove_name(std::string_view name, const std::string& file) {
  Facts facts = facts_of(file, name);
  facts.got = fmt::format("{} bytes", name.size());
  if (name.empty()) fail(Category::format_name, "a tensor without a name", facts);
  if (name.size() > kLongestName) {
    facts.expected = fmt::format("{} bytes at most", kLongestName);
    fail(Category::format_name, "a tensor's name is too long", facts);
  }
  const bool control = std::any_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
  });
  if (control) fail(Category::format_name, "a control byte in a tensor's name", facts);
}

uint64_t proven_bytes(const TensorSpec& spec, const std::string& file) {
  Facts facts = facts_of(file, spec.fqn);
  auto overflow = [&]() {
    facts.got = fmt::format("{} {}", stored_name(spec.dtype), shape_text(spec.shape));
    fail(Category::format_overflow, "the tensor's size does not fit 63 bits", facts);
  };
  int64_t numel = 1;
  for (const int64_t dim : spec.shape) {
    const auto product = checked_mul(numel, dim);
    if (!product) overflow();
    numel = *product;
  }
  // Eight elements are a whole number of bytes in every dtype.
  const auto bits = static_cast<uint64_t>(bits_per_element(spec.dtype));
  const uint64_t rest_bits = static_cast<uint64_t>(numel) % 8 * bits;
  const auto whole = checked_mul(static_cast<uint64_t>(numel) / 8, bits);
  const auto bytes = whole ? checked_add(*whole, rest_bits / 8) : std::nullopt;
  if (!bytes || *bytes > kLargest) overflow();
  if (rest_bits % 8 != 0) {
    facts.got = fmt::format("{} {}", stored_name(spec.dtype), shape_text(spec.shape));
    fail(Category::format_align, "the tensor is no whole number of bytes", facts);
  }
  return *bytes;
}

Header read_header(File& file, uint32_t file_index) {
  Header header;
  header.file.name = std::string(file.name());
  header.file.identity = file.identity();
  const uint64_t size_bytes = header.file.identity.size_bytes;
  const uint64_t length = read_length(file, size_bytes);
  header.file.header_bytes = kLengthPrefix + length;
  {
    std::string text(length, '\0');
    file.read(std::as_writable_bytes(std::span(text)), kLengthPrefix);
    HeaderParser(text, header, file_index).parse();
  }
  prove_arithmetic(header);
  sort_by_place(header.tensors);
  prove_layout(header, size_bytes - header.file.header_bytes);
  if (file.identity() != header.file.identity) {
    fail(Category::conflict, "the file changed while its header was read", facts_of(file.name()));
  }
  for (Stored& stored : header.tensors) {
    stored.at.begin += header.file.header_bytes;
    stored.at.end += header.file.header_bytes;
  }
  return header;
}

}  // namespace modicum
