// The text of manifest.json.
#include <fmt/format.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "modicum/base/base.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/checkpoint/record_text.h"
#include "modicum/checkpoint/run.h"
#include "modicum/json/json.h"

namespace modicum {
namespace {

constexpr int64_t kRecordVersion = 1;

[[noreturn]] void refuse(const std::string& what) {
  fail(Category::integrity, what, {.file = kManifest});
}

Digest digest_value(JsonValue& value) {
  const std::string text = value.string();
  const auto high = from_hex(std::string_view(text).substr(0, 16));
  const auto low = text.size() == 32 ? from_hex(std::string_view(text).substr(16)) : std::nullopt;
  if (!high || !low) refuse("a digest is not 32 hex digits");
  return {*high, *low};
}

// A file name without a leading dot, optionally in one of kDirectories.
bool is_plain_name(std::string_view name) {
  for (const char* const directory : kDirectories) {
    const std::string prefix = fmt::format("{}/", directory);
    if (!name.starts_with(prefix)) continue;
    name.remove_prefix(prefix.size());
    break;
  }
  return !name.empty() && name.front() != '.' && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

CheckpointFile read_checkpoint_file(JsonValue& value) {
  CheckpointFile file;
  value.object([&](std::string_view key, JsonValue& member) {
    if (key == "name") file.name = member.string();
    if (key == "bytes") file.bytes = static_cast<uint64_t>(member.integer());
    if (key == "digested_bytes") file.digested_bytes = static_cast<uint64_t>(member.integer());
    if (key == "digest") file.digest = digest_value(member);
  });
  if (!is_plain_name(file.name)) {
    refuse(fmt::format("invalid file name '{}' in the record", printable(file.name)));
  }
  if (file.digested_bytes > file.bytes) refuse("a digest covers more bytes than its file has");
  return file;
}

uint64_t chunks_of(uint64_t bytes) noexcept {
  return bytes / kDigestChunkBytes + (bytes % kDigestChunkBytes != 0 ? 1 : 0);
}

// Readers use the digests as those of the tensor's chunks, one after another. A tensor without a
// name is refused so that the memory of all tensors is in proportion to the text.
void prove_tensor(const CheckpointTensor& tensor) {
  const std::optional<uint64_t> bytes = checked_bytes(tensor.spec.dtype, tensor.spec.shape);
  if (tensor.spec.fqn.empty()) refuse("a tensor has no name");
  if (!bytes) refuse("a tensor's size does not fit 64 bits");
  for (const auto* const sums : {&tensor.chunks, &tensor.checksums}) {
    if (sums->size() == chunks_of(*bytes)) continue;
    if (sums == &tensor.checksums && sums->empty()) continue;
    fail(Category::integrity, "a tensor has another number of digests than chunks",
         {.file = kManifest,
          .tensor = tensor.spec.fqn,
          .expected = std::to_string(chunks_of(*bytes)),
          .got = std::to_string(sums->size())});
  }
}

CheckpointTensor read_tensor(JsonValue& value) {
  CheckpointTensor tensor;
  bool has_dtype = false;
  value.object([&](std::string_view key, JsonValue& member) {
    if (key == "name") tensor.spec.fqn = member.string();
    if (key == "dtype") {
      const auto dtype = dtype_from_stored_name(member.string());
      if (!dtype) refuse("a tensor has an unknown dtype");
      tensor.spec.dtype = *dtype;
      has_dtype = true;
    }
    if (key == "shape") {
      member.array([&](JsonValue& dim) { tensor.spec.shape.push_back(dim.integer()); });
    }
    if (key == "chunks" || key == "checksums") {
      (key == "chunks" ? tensor.chunks : tensor.checksums) = sums_value(member, kManifest);
    }
  });
  if (!has_dtype) refuse("a tensor has no dtype");
  prove_tensor(tensor);
  return tensor;
}

void file_object(JsonWriter& out, const CheckpointFile& file) {
  out.begin_object()
      .member("name", file.name)
      .member("bytes", file.bytes)
      .member("digested_bytes", file.digested_bytes)
      .member("digest", file.digest.hex())
      .end_object();
}

void tensor_object(JsonWriter& out, const CheckpointTensor& tensor, bool with_checksums) {
  const TensorSpec& spec = tensor.spec;
  out.begin_object().member("name", spec.fqn).member("dtype", stored_name(spec.dtype));
  out.key("shape").begin_array();
  for (const int64_t dim : spec.shape) out.value(dim);
  out.end_array();
  sums_member(out, "chunks", tensor.chunks);
  if (with_checksums && !tensor.checksums.empty()) sums_member(out, "checksums", tensor.checksums);
  out.end_object();
}

// The length of the longest entry of a file in `files`, with a comma.
uint64_t most_file_bytes(const std::string& name) {
  JsonWriter out;
  file_object(out, {name, UINT64_MAX, UINT64_MAX, {}});
  return out.text().size() + 1;
}

constexpr uint64_t kChunkText = 19;  // 16 digits, quotes, a comma

// The length of a tensor's entry with `sums`, unless its name has escapes or its dims are long.
uint64_t likely_bytes(const TensorSpec& spec, uint64_t sums) {
  constexpr uint64_t kAround = 96, kDim = 8;
  return spec.fqn.size() + kAround + kDim * spec.shape.size() + kChunkText * sums;
}

// A text that grows as it is written is in memory twice for a moment.
uint64_t likely_bytes(const std::vector<CheckpointTensor>& tensors) {
  uint64_t bytes = 0;
  for (const CheckpointTensor& tensor : tensors) {
    bytes += likely_bytes(tensor.spec, tensor.chunks.size() + tensor.checksums.size());
  }
  return bytes;
}

uint64_t tensor_bytes(const TensorSpec& spec, uint64_t chunks) {
  JsonWriter out;
  tensor_object(out, {spec, {}, {}}, false);
  return out.text().size() + 1 + kChunkText * chunks;
}

}  // namespace

std::string record_json(const CheckpointRecord& record, bool with_checksums) {
  JsonWriter out;
  out.reserve(likely_bytes(record.tensors) + likely_bytes(record.state));
  const auto tensors_member = [&](std::string_view key,
                                  const std::vector<CheckpointTensor>& tensors) {
    out.key(key).begin_array();
    for (const CheckpointTensor& tensor : tensors) tensor_object(out, tensor, with_checksums);
    out.end_array();
  };
  out.begin_object()
      .member("version", kRecordVersion)
      .member("step", record.step)
      .member("uuid", record.uuid)
      .member("world_size", record.world_size)
      .member("tool", record.tool);
  out.key("files").begin_array();
  for (const CheckpointFile& file : record.files) file_object(out, file);
  out.end_array();
  tensors_member("tensors", record.tensors);
  tensors_member("state", record.state);
  out.end_object();
  return out.take();
}

uint64_t most_record_bytes(std::span<const Manifest* const> parts,
                           std::span<const std::string> others) {
  const std::string folder = fmt::format("{}/", kStateDirectory);
  uint64_t bytes = kMiB;
  for (const std::string& name : others) bytes += most_file_bytes(name);
  for (const Manifest* const part : parts) {
    bytes += most_file_bytes(folder + kIndexFile);
    for (const DataFile& file : part->files) bytes += most_file_bytes(folder + file.name);
    for (const StoredTensor& tensor : part->tensors)
      bytes += tensor_bytes(tensor.spec, digest_chunks_of(tensor));
  }
  return bytes;
}

uint64_t record_bytes(const Manifest& part) {
  uint64_t bytes = 0;
  for (const StoredTensor& tensor : part.tensors) {
    const uint64_t chunks = digest_chunks_of(tensor);
    bytes += sizeof(CheckpointTensor) + heap_bytes(tensor.spec) +
             2 * heap_block_bytes(chunks * sizeof(uint64_t)) +
             likely_bytes(tensor.spec, 2 * chunks);
  }
  return bytes;
}

void require_readable(uint64_t bytes, const std::string& file, uint64_t most) {
  if (bytes <= most) return;
  fail(Category::unsupported, "the file would be too long to be read again",
       {.file = file,
        .expected = fmt::format("at most {} bytes", most),
        .got = fmt::format("{} bytes", bytes)});
}

void require_recordable(std::span<const Manifest* const> parts,
                        std::span<const std::string> others) {
  require_readable(most_record_bytes(parts, others), kManifest);
}

bool is_record(const std::string& text) {
  bool has_version = false, has_step = false, has_uuid = false;
  try {
    read_json(text, [&](JsonValue& root) {
      if (root.kind() != JsonValue::Kind::object) return;
      root.object([&](std::string_view key, JsonValue& member) {
        const JsonValue::Kind kind = member.kind();
        has_version |= key == "version" && kind == JsonValue::Kind::number;
        has_step |= key == "step" && kind == JsonValue::Kind::number;
        has_uuid |= key == "uuid" && kind == JsonValue::Kind::string;
      });
    });
  } catch (const JsonError&) {
    return false;
  }
  return has_version && has_step && has_uuid;
}

CheckpointRecord parse_record(const std::string& text) {
  CheckpointRecord record;
  std::optional<int64_t> version;
  try {
    read_json(text, [&](JsonValue& root) {
      root.object([&](std::string_view key, JsonValue& member) {
        if (key == "version") {
          version = member.integer();
          require_version(*version, kRecordVersion, kManifest);
        }
        if (key == "step") record.step = member.integer();
        if (key == "uuid") record.uuid = member.string();
        if (key == "world_size") record.world_size = static_cast<int>(member.integer());
        if (key == "tool") record.tool = member.string();
        if (key == "files") {
          member.array(
              [&](JsonValue& file) { record.files.push_back(read_checkpoint_file(file)); });
        }
        if (key == "tensors" || key == "state") {
          auto& tensors = key == "state" ? record.state : record.tensors;
          member.array([&](JsonValue& tensor) { tensors.push_back(read_tensor(tensor)); });
        }
      });
    });
  } catch (const JsonError& error) {
    fail(Category::integrity, error.what(), {.file = kManifest, .offset = error.offset});
  }
  if (!version) refuse("there is no version");
  return record;
}

}  // namespace modicum
