#include <fmt/format.h>

#include <map>

#include "modicum/json/json.h"
#include "modicum/report/members.h"
#include "modicum/report/report.h"

namespace modicum {
namespace {

struct DTypeSum {
  uint64_t tensors = 0;
  uint64_t elements = 0;
  uint64_t bytes = 0;
};
using DTypeSums = std::map<DType, DTypeSum>;

DTypeSums sums_of(const Manifest& manifest) {
  DTypeSums sums;
  for (const StoredTensor& stored : manifest.tensors) {
    DTypeSum& sum = sums[stored.spec.dtype];
    sum.tensors += 1;
    sum.elements += static_cast<uint64_t>(numel_of(stored.spec.shape));
    sum.bytes += stored.at.bytes();
  }
  return sums;
}

uint64_t elements_of(const DTypeSums& sums) {
  uint64_t elements = 0;
  for (const auto& [dtype, sum] : sums) elements += sum.elements;
  return elements;
}

void tensor_objects(const Manifest& manifest, JsonWriter& out) {
  out.key("tensors").begin_array();
  for (const StoredTensor& stored : manifest.tensors) {
    out.begin_object().member("name", stored.spec.fqn);
    out.member("dtype", torch_name(stored.spec.dtype)).key("shape").begin_array();
    for (const int64_t size : stored.spec.shape) out.value(size);
    out.end_array().member("file", manifest.files[stored.at.file].name);
    out.member("begin", stored.at.begin).member("end", stored.at.end).end_object();
  }
  out.end_array();
}

}  // namespace

CheckpointFacts facts_of(const Checkpoint& checkpoint) {
  return {checkpoint.manifest.data_bytes(), checkpoint.manifest.tensors.size(),
          checkpoint.manifest.files.size(), checkpoint.hub,
          checkpoint.config.model_type,     checkpoint.warnings};
}

std::string inspect_json(const Checkpoint& checkpoint) {
  const Manifest& manifest = checkpoint.manifest;
  const DTypeSums sums = sums_of(manifest);
  JsonWriter out;
  out.begin_object().key("checkpoint").begin_object();
  out.member("bytes", manifest.data_bytes());
  out.member("tensors", static_cast<uint64_t>(manifest.tensors.size()));
  out.member("files", static_cast<uint64_t>(manifest.files.size()));
  out.member("parameters", elements_of(sums)).member("identity", manifest.identity.hex());
  out.end_object();
  revision_member(out, checkpoint.hub);
  out.member("model_type", checkpoint.config.model_type);
  out.member("tie_word_embeddings", checkpoint.config.tie_word_embeddings);
  out.key("dtypes").begin_object();
  for (const auto& [dtype, sum] : sums) {
    out.key(torch_name(dtype)).begin_object().member("tensors", sum.tensors);
    out.member("elements", sum.elements).member("bytes", sum.bytes).end_object();
  }
  out.end_object().key("files").begin_array();
  for (const DataFile& file : manifest.files) {
    out.begin_object().member("name", file.name).member("bytes", file.identity.size_bytes);
    out.member("header_bytes", file.header_bytes).end_object();
  }
  out.end_array();
  tensor_objects(manifest, out);
  warnings_member(out, checkpoint.warnings);
  return out.end_object().take();
}

std::string inspect_text(const Checkpoint& checkpoint, bool verbose) {
  const Manifest& manifest = checkpoint.manifest;
  const DTypeSums sums = sums_of(manifest);
  std::string text = fmt::format(
      "{}: {} in {} ({} elements), {}{}{}\n",
      checkpoint.hub ? name_of(*checkpoint.hub) : printable(checkpoint.directory),
      format_size(manifest.data_bytes()), counted(manifest.tensors.size(), "tensor"),
      elements_of(sums), counted(manifest.files.size(), "file"),
      checkpoint.config.model_type.empty() ? "" : ", " + printable(checkpoint.config.model_type),
      checkpoint.config.tie_word_embeddings ? ", tied word embeddings" : "");
  for (const auto& [dtype, sum] : sums) {
    text += fmt::format("  {:<16} {:>8} tensors {:>12}\n", torch_name(dtype), sum.tensors,
                        format_size(sum.bytes));
  }
  if (verbose) {
    for (const StoredTensor& stored : manifest.tensors) {
      text += fmt::format("  {} {} {}\n", printable(stored.spec.fqn), torch_name(stored.spec.dtype),
                          shape_text(stored.spec.shape));
    }
  }
  return text + warnings_text(checkpoint.warnings);
}

}  // namespace modicum
