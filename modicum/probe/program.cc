#include "modicum/probe/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "modicum/io/io.h"
#include "modicum/probe/kernel_text.h"
#include "modicum/probe/mappings.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

std::string directory_of(int pid, const std::string& root) {
  return fmt::format("{}/proc/{}", root, pid);
}

// ---- children

struct Process {
  int parent = 0;
  std::string auxv;  // kept by fork, renewed by exec; empty for a zombie
  std::string command;
};

int parent_of(const std::string& status) {
  return static_cast<int>(kernel_number_after(status, "PPid:").value_or(0));
}

Process read_process(int pid, const std::string& root) {
  const std::string directory = directory_of(pid, root);
  return {.parent = parent_of(read_kernel_text(directory + "/status").value_or("")),
          .auxv = read_kernel_text(directory + "/auxv").value_or(""),
          .command = read_kernel_text(directory + "/cmdline").value_or("")};
}

using Processes = std::map<int, Process>;

bool is_forked(const Process& process, const Processes& all) {
  const auto parent = all.find(process.parent);
  return parent != all.end() && !process.auxv.empty() && process.auxv == parent->second.auxv;
}

StartMethod method_of(const Process& process, const Processes& all) {
  const auto runs = [&](std::string_view module) {
    return process.command.find(module) != std::string::npos;
  };
  const bool is_server = runs("multiprocessing.forkserver import main");
  if (is_forked(process, all)) return is_server ? StartMethod::forkserver : StartMethod::fork;
  if (is_server || runs("multiprocessing.resource_tracker")) return StartMethod::helper;
  return runs("multiprocessing.spawn import spawn_main") ? StartMethod::spawn : StartMethod::exec;
}

// A chain of forks consists of a process and its descendants without an exec since. Counts the
// shared and copied pages of each chain with one read_tree of its first process.
void count_shared(Program& program, const Processes& all, const std::string& root) {
  for (const auto& [pid, process] : all) {
    if (pid != program.pid && is_forked(process, all)) continue;
    const bool has_forked = std::any_of(all.begin(), all.end(), [&, at = pid](const auto& other) {
      return other.second.parent == at && is_forked(other.second, all);
    });
    if (!has_forked) continue;
    TreeMemory tree;
    try {
      tree = read_tree(pid, {}, root);
    } catch (const Error&) {
      if (pid == program.pid) throw;
      continue;  // the process has ended
    }
    program.exposed_bytes += tree.rest.shared_bytes;
    program.copied_bytes += tree.rest.copied_bytes;
    for (const TreeMemory::Process& tree_process : tree.processes) {
      const auto child =
          std::find_if(program.children.begin(), program.children.end(),
                       [&](const ChildProcess& each) { return each.pid == tree_process.pid; });
      if (tree_process.is_forked && child != program.children.end())
        child->shared_bytes = tree_process.shared_bytes;
    }
  }
}

// ---- mappings

bool maps_file(const std::vector<ProcessMapping>& mappings, std::string_view name) {
  return std::any_of(mappings.begin(), mappings.end(), [&](const ProcessMapping& mapping) {
    const size_t slash = mapping.name.rfind('/');
    return slash != std::string::npos && mapping.name.substr(slash + 1).starts_with(name);
  });
}

std::string allocator_in(const std::vector<ProcessMapping>& mappings) {
  for (const char* const name : {"jemalloc", "tcmalloc", "mimalloc"}) {
    if (maps_file(mappings, fmt::format("lib{}", name))) return name;
  }
  return {};
}

// ---- environment

std::string variable_in(std::string_view environ, std::string_view name) {
  for (const std::string_view variable : split_kernel_text(environ, '\0')) {
    if (variable.size() > name.size() && variable.starts_with(name) &&
        variable[name.size()] == '=') {
      return std::string(variable.substr(name.size() + 1));
    }
  }
  return {};
}

std::optional<uint64_t> arena_max_in(std::string_view environ) {
  if (const auto max = parse_kernel_number(variable_in(environ, "MALLOC_ARENA_MAX"))) return max;
  constexpr std::string_view kTunable = "glibc.malloc.arena_max=";
  const std::string tunables = variable_in(environ, "GLIBC_TUNABLES");
  for (const std::string_view tunable : split_kernel_text(tunables, ':')) {
    if (tunable.starts_with(kTunable)) return parse_kernel_number(tunable.substr(kTunable.size()));
  }
  return std::nullopt;
}

void read_environment(Program& program, const std::string& directory) {
  const std::string environ = read_kernel_text(directory + "/environ").value_or("");
  program.arena_max = arena_max_in(environ);
  program.torch_allocator_options = variable_in(environ, "PYTORCH_ALLOC_CONF");
  if (program.torch_allocator_options.empty()) {
    program.torch_allocator_options = variable_in(environ, "PYTORCH_CUDA_ALLOC_CONF");
  }
}

void read_own(Program& program, const std::string& root) {
  const std::string directory = directory_of(program.pid, root);
  Facts facts{.culprit_pid = program.pid};
  const auto status = read_kernel_text(directory + "/status");
  if (!status) {
    facts.expected = "a running process";
    fail(Category::io, fmt::format("there is no process {}", program.pid), std::move(facts));
  }
  const auto read = read_mappings(program.pid, root);
  if (!read) {
    facts.file = "maps";
    facts.expected = "a process of this user (or to run as root)";
    fail(Category::io, "cannot read the memory map of the process", std::move(facts));
  }
  const std::vector<ProcessMapping>& mappings = *read;
  if (mappings.empty()) fail(Category::io, "the process has ended", std::move(facts));
  const auto bytes = [&](std::string_view label) {
    return kernel_number_after(*status, label).value_or(0) * kKiB;
  };
  program.swapped_bytes = bytes("VmSwap:");
  program.locked_bytes = bytes("VmLck:") + bytes("VmPin:");
  program.mappings = mappings.size();
  program.kinds = read_memory_kinds(program.pid, root).value_or(MemoryKinds());
  for (size_t at = 0; at < mappings.size(); ++at) {
    program.arena_heaps += arena_heaps_in(mappings, at);
  }
  program.allocator = allocator_in(mappings);
  program.uses_cuda = maps_file(mappings, "libcuda.so");
  const std::string comm = read_kernel_text(directory + "/comm").value_or("");
  const std::vector<std::string_view> lines = split_kernel_text(comm, '\n');
  if (!lines.empty()) program.name = lines.front();
  read_environment(program, directory);
  try {
    program.open_files = PosixFileSystem().list(directory + "/fd").size();
  } catch (const Error&) {
    program.open_files = 0;  // the process has ended meanwhile
  }
}

}  // namespace

std::string_view start_method_name(StartMethod method) noexcept {
  constexpr std::array<std::string_view, 5> kNames = {"fork", "spawn", "forkserver", "helper",
                                                      "exec"};
  return kNames[static_cast<size_t>(method)];
}

Program read_program(int pid, const std::string& root) {
  Program program{.pid = pid};
  read_own(program, root);
  Processes all = {{pid, read_process(pid, root)}};
  const std::vector<int> below = descendants(pid, root);
  for (const int child : below) all.emplace(child, read_process(child, root));
  for (const int child : below) {
    const Process& process = all.at(child);
    if (process.auxv.empty()) continue;  // ended, a zombie, or another user's
    program.children.push_back({child, process.parent, method_of(process, all), 0});
  }
  count_shared(program, all, root);
  return program;
}

}  // namespace modicum
