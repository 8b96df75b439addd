// The test double of /proc and /sys.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "modicum/io/temp_dir_double.h"

namespace modicum {

// The /proc and /sys of an imaginary machine, in a temporary directory.
class Machine {
 public:
  const std::string& root() const { return root_.path(); }

  void put(const std::string& path, std::string_view text) {
    const std::filesystem::path file = root_.path() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void put_node(uint64_t total_kib, uint64_t available_kib) {
    put("/proc/meminfo", "MemTotal:       " + std::to_string(total_kib) + " kB\nMemFree:  1 kB\n" +
                             "MemAvailable:   " + std::to_string(available_kib) + " kB\n");
  }
  // `path` is the cgroup's. The figures 7 and 9 exclude child cgroups; they must not be read.
  void put_v1(const std::string& path, std::string_view limit, uint64_t usage,
              uint64_t inactive_file = 0, uint64_t active_file = 0) {
    const std::string directory = "/sys/fs/cgroup/memory" + path;
    put(directory + "/memory.limit_in_bytes", limit);
    put(directory + "/memory.usage_in_bytes", std::to_string(usage) + "\n");
    put(directory + "/memory.stat", "inactive_file 7\nactive_file 9\ntotal_inactive_file " +
                                        std::to_string(inactive_file) + "\ntotal_active_file " +
                                        std::to_string(active_file) + "\n");
  }
  struct V2 {
    std::string_view max, high;
    uint64_t usage, inactive_file = 0, active_file = 0;
  };
  void put_v2(const std::string& path, const V2& group) {
    const std::string directory = "/sys/fs/cgroup" + path;
    put(directory + "/memory.max", group.max);
    put(directory + "/memory.high", group.high);
    put(directory + "/memory.current", std::to_string(group.usage) + "\n");
    put(directory + "/memory.stat", "anon 5\ninactive_anon 3\ninactive_file " +
                                        std::to_string(group.inactive_file) + "\nactive_file " +
                                        std::to_string(group.active_file) + "\n");
  }

 private:
  TempDir root_;
};

}  // namespace modicum
