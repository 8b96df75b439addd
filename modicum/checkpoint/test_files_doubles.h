// For the tests of this room: small safetensors files and indexes, and the error of opening one.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/file_doubles.h"
#include "modicum/json/json.h"

namespace modicum {

// The bytes of a file: the length prefix, `header`, and `data_bytes` bytes of data.
inline std::string file_bytes(std::string_view header, size_t data_bytes) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(uint64_t{header.size()} >> (8 * i));
  bytes += header;
  for (size_t i = 0; i < data_bytes; ++i) bytes += static_cast<char>(i * 7);
  return bytes;
}

// The bytes of a file with U8 tensors of the given names and sizes.
inline std::string file_with(const std::vector<std::pair<std::string, uint64_t>>& sizes) {
  JsonWriter json;
  json.begin_object();
  uint64_t end = 0;
  for (const auto& [name, size] : sizes) {
    json.key(name).begin_object().member("dtype", "U8");
    json.key("shape").begin_array().value(size).end_array();
    json.key("data_offsets").begin_array().value(end).value(end + size).end_array().end_object();
    end += size;
  }
  return file_bytes(json.end_object().text(), end);
}

// The text of an index with this weight_map: the file name of each tensor.
inline std::string index_with(const std::map<std::string, std::string>& weight_map,
                              uint64_t total_size) {
  const std::vector<std::pair<std::string, std::string>> rows(weight_map.begin(), weight_map.end());
  return index_json(rows, total_size);
}

// The error that open_checkpoint throws; empty if it succeeds.
inline std::optional<Error> failure(FileSystem& files, const std::string& path) {
  try {
    open_checkpoint(files, path);
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

}  // namespace modicum
