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

// Recognises files of other formats by their first bytes; "" if the format is unknown.
std::string_view other_format(std::string_view prefix) {
  if (prefix.starts_with("version ")) return "a Git LFS pointer; `git lfs pull` gets the file";
  if (prefix.starts_with("GGUF")) return "a GGUF file";
  if (prefix.starts_with("PK\x03\x04")) return "a zip archive, as torch.save writes";
  return prefix.starts_with("<") ? "an HTML or XML page; download the file again" : "";
}

// R2: the length prefix, checked against the limits and the file's size.
uint64_t read_length(File& file, uint64_t size_bytes) {
  const auto refuse = [&](Category category, const char* what, std::string expected, uint64_t got) {
    fail(category, what,
         {.file = std::string(file.name()),
          .expected = std::move(expected),
          .got = fmt::format("{} bytes", got)});
  };
  if (size_bytes < kLengthPrefix) {
    refuse(Category::format_trunc, "the file ends inside its length prefix", "8 bytes at least",
           size_bytes);
  }
  std::array<std::byte, kLengthPrefix> prefix{};
  file.read(prefix, 0);
  uint64_t length = 0;
  for (size_t i = 0; i < prefix.size(); ++i) length |= static_cast<uint64_t>(prefix[i]) << (8 * i);
  if (length > kLargestHeader) {
    const auto other = other_format({reinterpret_cast<const char*>(prefix.data()), prefix.size()});
    if (!other.empty()) {
      fail(Category::format_limit, "the file has another format",
           {.file = std::string(file.name()),
            .expected = "a safetensors file",
            .got = std::string(other)});
    }
    refuse(Category::format_limit, "the header is too long",
           fmt::format("{} bytes at most", kLargestHeader), length);
  }
  if (length > size_bytes - kLengthPrefix) {
    refuse(Category::format_trunc, "the file ends inside its header",
           fmt::format("{} bytes at most", size_bytes - kLengthPrefix), length);
  }
  if (length < 2) {
    refuse(Category::format_header, "the header is too short", "2 bytes at least", length);
  }
  return length;
}

bool begins_with_brace(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && text[first] == '{';
}

// Whether the number at `offset` is a syntactically valid integer. If so, and it failed to parse,
// it is too large.
bool is_plain_integer(std::string_view text, uint64_t offset) {
  const std::string_view number = text.substr(offset);
  const size_t end = number.find_first_not_of("0123456789");
  return end != 0 && (end == std::string_view::npos ||
                      std::string_view(".eE").find(number[end]) == std::string_view::npos);
}

// Parses a header's text: first as JSON (R4 to R7), then by its schema (R8 to R12, R14).
class HeaderParser {
 public:
  HeaderParser(std::string_view text, Header& header, uint32_t file_index)
      : text_(text), header_(header), file_index_(file_index) {}

  void parse() {
    header_.tensors.reserve(prove_json());
    try {
      reread_json(text_, [this](JsonValue& root) {
        root.object([this](std::string_view name, JsonValue& value) { member(name, value); });
      });
    } catch (const JsonError& error) {
      const bool large = error.fault == JsonFault::range && is_plain_integer(text_, error.offset);
      refuse(large ? Category::format_overflow : Category::format_schema, error.what(),
             error.offset);
    }
  }

 private:
  struct Entry {
    StoredTensor stored;
    bool has_dtype = false;
    bool has_shape = false;
    bool has_offsets = false;
  };
  // R4 to R7. A separate pass, so that invalid JSON is reported before any schema error. Returns
  // the number of tensors, so that a vector of exactly this size can be reserved.
  size_t prove_json() {
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

  void member(std::string_view name, JsonValue& value) {
    tensor_ = name;
    if (name == kMetadataKey) return metadata(value);
    prove_name(name, header_.file.name);
    entry(value);
  }

  void metadata(JsonValue& value) {
    value.object([this](std::string_view key, JsonValue& text) {
      header_.metadata.emplace(key, text.string());
    });
  }

  void entry(JsonValue& value) {
    const uint64_t begin = value.offset();
    Entry entry;
    value.object([this, &entry](std::string_view key, JsonValue& v) { field(key, v, entry); });
    if (!entry.has_dtype) refuse(Category::format_schema, "no dtype", begin);
    if (!entry.has_shape) refuse(Category::format_schema, "no shape", begin);
    if (!entry.has_offsets) refuse(Category::format_schema, "no data_offsets", begin);
    entry.stored.spec.fqn = std::string(tensor_);  // an assignment would reserve more than it needs
    entry.stored.at.file = file_index_;
    header_.tensors.push_back(std::move(entry.stored));
  }

  void field(std::string_view key, JsonValue& value, Entry& entry) {
    const uint64_t at = value.offset();
    if (key == "dtype") {
      const std::string name = value.string();
      const auto dtype = dtype_from_stored_name(name);
      if (!dtype) refuse(Category::format_dtype, "unknown dtype " + printable(name), at);
      entry.stored.spec.dtype = *dtype;
      entry.has_dtype = true;
    } else if (key == "shape") {
      integers(value, kMostDims);
      entry.stored.spec.shape.assign(integers_.begin(), integers_.end());
      entry.has_shape = true;
    } else if (key == "data_offsets") {
      integers(value, 2);
      if (integers_.size() != 2) {
        refuse(Category::format_schema,
               fmt::format("expected two data_offsets, got {}", integers_.size()), at);
      }
      entry.stored.at.begin = static_cast<uint64_t>(integers_[0]);
      entry.stored.at.end = static_cast<uint64_t>(integers_[1]);
      entry.has_offsets = true;
    } else {
      refuse(Category::format_schema, "unknown key " + printable(key), at);
    }
  }

  void integers(JsonValue& value, size_t most) {
    integers_.clear();
    value.array([this, most](JsonValue& element) {
      if (integers_.size() == most) {
        refuse(Category::format_schema, fmt::format("over {} numbers", most), element.offset());
      }
      integers_.push_back(element.integer());
    });
  }

  [[noreturn]] void refuse(Category category, const std::string& what, uint64_t offset) const {
    fail(category, what,
         {.file = header_.file.name, .tensor = tensor_, .offset = kLengthPrefix + offset});
  }

  std::string_view text_;
  Header& header_;
  uint32_t file_index_;
  std::string tensor_;             // the current entry's name
  std::vector<int64_t> integers_;  // the elements of the array that was read last
};

// The facts of an error about a tensor whose offsets still count from the end of the header.
Facts facts_of(const Header& header, const StoredTensor& stored, std::string expected,
               std::string got) {
  return {.file = header.file.name,
          .tensor = stored.spec.fqn,
          .offset = header.file.header_bytes + stored.at.begin,
          .expected = std::move(expected),
          .got = std::move(got)};
}

// R12 to R14.
void prove_arithmetic(const Header& header) {
  for (const StoredTensor& stored : header.tensors) {
    const uint64_t bytes = proven_bytes(stored.spec, header.file.name);
    const auto got = [&] { return fmt::format("[{}, {}]", stored.at.begin, stored.at.end); };
    if (stored.at.begin > stored.at.end) {
      fail(Category::format_offsets, "data_offsets run backwards",
           facts_of(header, stored, "", got()));
    }
    if (stored.at.bytes() != bytes) {
      fail(Category::format_size, "data_offsets do not fit dtype and shape",
           facts_of(header, stored, fmt::format("{} bytes", bytes), got()));
    }
  }
}

// R15, R16: in order, the tensors tile the data without gap or overlap, from its start to its end.
void prove_layout(const Header& header, uint64_t data_bytes) {
  const auto refuse_end = [&](Category category, const char* what, const std::string& tensor,
                              uint64_t expected_bytes) {
    fail(category, what,
         {.file = header.file.name,
          .tensor = tensor,
          .offset = header.file.header_bytes + std::min(expected_bytes, data_bytes),
          .expected = fmt::format("{} bytes of data", expected_bytes),
          .got = fmt::format("{} bytes of data", data_bytes)});
  };
  uint64_t end = 0;
  const StoredTensor* previous = nullptr;
  for (const StoredTensor& stored : header.tensors) {
    if (stored.at.begin != end) {
      const bool overlaps = stored.at.begin < end;
      fail(overlaps ? Category::format_overlap : Category::format_hole,
           overlaps ? "the tensor overlaps " + printable(previous->spec.fqn)
                    : "a hole before the tensor",
           facts_of(header, stored, fmt::format("begin {}", end),
                    fmt::format("begin {}", stored.at.begin)));
    }
    end = stored.at.end;
    previous = &stored;
    if (end > data_bytes) {
      refuse_end(Category::format_trunc, "the file ends before the tensor does", stored.spec.fqn,
                 header.tensors.back().at.end);
    }
  }
  if (end < data_bytes)
    refuse_end(Category::format_trailing, "bytes after the last tensor", "", end);
}

void sort_by_place(std::vector<StoredTensor>& tensors) {
  const auto before = [](const StoredTensor& a, const StoredTensor& b) {
    return std::tie(a.at.begin, a.at.end, a.spec.fqn) < std::tie(b.at.begin, b.at.end, b.spec.fqn);
  };
  if (std::is_sorted(tensors.begin(), tensors.end(), before)) return;
  std::sort(tensors.begin(), tensors.end(), before);
  // A string that was swapped may have inherited a larger buffer.
  for (StoredTensor& stored : tensors) stored.spec.fqn.shrink_to_fit();
}

}  // namespace

void prove_name(std::string_view name, const std::string& file) {
  const bool control = std::any_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
  });
  if (!control && !name.empty() && name.size() <= kLongestName) return;
  fail(Category::format_name, "invalid tensor name",
       {.file = file,
        .tensor = std::string(name),
        .expected = fmt::format("1 to {} bytes, none of them a control byte", kLongestName),
        .got = control ? "a control byte" : fmt::format("{} bytes", name.size())});
}

uint64_t proven_bytes(const TensorSpec& spec, const std::string& file) {
  const auto refuse = [&](Category category, const char* what) {
    fail(category, what,
         {.file = file,
          .tensor = spec.fqn,
          .got = fmt::format("{} {}", stored_name(spec.dtype), shape_text(spec.shape))});
  };
  const auto overflow = [&] {
    refuse(Category::format_overflow, "the tensor's size does not fit 63 bits");
  };
  const auto counted = checked_numel(spec.shape);
  if (!counted) overflow();
  const int64_t numel = *counted;
  // Eight elements are a whole number of bytes in every dtype.
  const auto bits = static_cast<uint64_t>(bits_per_element(spec.dtype));
  const uint64_t rest_bits = static_cast<uint64_t>(numel) % 8 * bits;
  const auto whole = checked_mul(static_cast<uint64_t>(numel) / 8, bits);
  const auto bytes = whole ? checked_add(*whole, rest_bits / 8) : std::nullopt;
  if (!bytes || *bytes > kLargest) overflow();
  if (rest_bits % 8 != 0) {
    refuse(Category::format_align, "the tensor is not a whole number of bytes");
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
  require_unchanged(file, header.file.identity);
  for (StoredTensor& stored : header.tensors) {
    stored.at.begin += header.file.header_bytes;
    stored.at.end += header.file.header_bytes;
  }
  return header;
}

}  // namespace modicum
