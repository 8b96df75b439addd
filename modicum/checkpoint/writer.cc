#include <algorithm>
#include <set>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

constexpr uint64_t kAlignment = 8;

// Checks the tensors by the rules of open_checkpoint. Returns the offset of each tensor in the
// data, followed by the size of the data.
std::vector<uint64_t> lay_out(std::span<const TensorSpec> tensors, const std::string& file) {
  std::vector<uint64_t> begins = {0};
  begins.reserve(tensors.size() + 1);
  std::set<std::string_view> names;
  for (const TensorSpec& spec : tensors) {
    const auto refuse = [&](Category category, const char* what) {
      fail(category, what, {.file = file, .tensor = spec.fqn});
    };
    prove_name(spec.fqn, file);
    if (spec.fqn == kMetadataKey) refuse(Category::format_name, "the name is reserved");
    if (!names.insert(spec.fqn).second)
      refuse(Category::format_dup, "two tensors have the same name");
    for (const int64_t dim : spec.shape) MODICUM_ASSERT(dim >= 0);
    const auto end = checked_add(begins.back(), proven_bytes(spec, file));
    if (!end) refuse(Category::format_overflow, "the file's size does not fit 64 bits");
    begins.push_back(*end);
  }
  return begins;
}

}  // namespace

HeaderText::HeaderText(const std::map<std::string, std::string>& metadata, uint64_t bytes) {
  json_.reserve(bytes);
  json_.begin_object();
  if (metadata.empty()) return;
  json_.key(kMetadataKey).begin_object();
  for (const auto& [key, text] : metadata) json_.member(key, text);
  json_.end_object();
}

void HeaderText::add(const TensorSpec& spec, uint64_t begin, uint64_t end) {
  json_.key(spec.fqn).begin_object().member("dtype", stored_name(spec.dtype));
  json_.key("shape").begin_array();
  for (const int64_t dim : spec.shape) json_.value(dim);
  json_.end_array().key("data_offsets").begin_array();
  json_.value(begin).value(end).end_array().end_object();
}

std::string HeaderText::take(const std::string& file) {
  json_.end_object();
  std::string header = json_.take();
  const uint64_t length = round_up(header.size(), kAlignment);
  if (length > kLargestHeader) {
    fail(Category::format_limit, "the header is too long",
         {.file = file,
          .expected = std::to_string(kLargestHeader) + " bytes at most",
          .got = std::to_string(length) + " bytes"});
  }
  header.resize(length, ' ');
  header.insert(0, kLengthPrefix, ' ');
  for (size_t i = 0; i < kLengthPrefix; ++i) header[i] = static_cast<char>(length >> (8 * i));
  return header;
}

std::string safetensors_header(std::span<const TensorSpec> tensors, const std::string& file,
                               const std::map<std::string, std::string>& metadata) {
  const std::vector<uint64_t> begins = lay_out(tensors, file);
  HeaderText text(metadata);
  for (size_t i = 0; i < tensors.size(); ++i) text.add(tensors[i], begins[i], begins[i + 1]);
  return text.take(file);
}

SafetensorsWriter::SafetensorsWriter(FileSystem& files, const std::string& path,
                                     std::span<const TensorSpec> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : begins_(lay_out(tensors, base_name(path))) {
  const std::string header = safetensors_header(tensors, base_name(path), metadata);
  header_bytes_ = header.size();
  file_ = files.create(path);
  file_->write(std::as_bytes(std::span(header)), 0);
}

void SafetensorsWriter::write(size_t index, uint64_t offset, std::span<const std::byte> bytes) {
  MODICUM_ASSERT(index + 1 < begins_.size());
  const uint64_t tensor_bytes = begins_[index + 1] - begins_[index];
  MODICUM_ASSERT(offset <= tensor_bytes);
  MODICUM_ASSERT(bytes.size() <= tensor_bytes - offset);
  file_->write(bytes, header_bytes_ + begins_[index] + offset);
}

void SafetensorsWriter::sync() { file_->sync(); }

void SafetensorsWriter::finish() {
  file_->truncate(header_bytes_ + begins_.back());
  file_->sync();
  file_->close();
}

std::string index_json(std::span<const std::pair<std::string, std::string>> file_of_tensor,
                       uint64_t total_bytes) {
  JsonWriter json;
  json.begin_object().key("metadata").begin_object();
  json.member("total_size", total_bytes).end_object();
  json.key("weight_map").begin_object();
  for (const auto& [tensor, file] : file_of_tensor) json.member(tensor, file);
  json.end_object().end_object();
  require_readable(json.text().size(), kIndexFile);
  return json.take();
}

}  // namespace modicum
