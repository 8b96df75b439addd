#include "modicum/report/growth.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "modicum/report/timeline.h"

namespace modicum {
namespace {

constexpr size_t kFewestSamples = 8;
constexpr double kShortest_s = 1;
constexpr double kExplained = 0.6;  // the least r^2 of a steady growth

struct Point {
  double at_s = 0;
  double bytes = 0;
};

// The line through the points with the least squares.
struct Line {
  double bytes_per_s = 0;
  double explained = 0;  // r^2
};

Line line_through(const std::vector<Point>& points) {
  double mean_s = 0, mean_bytes = 0;
  for (const Point& point : points) {
    mean_s += point.at_s / static_cast<double>(points.size());
    mean_bytes += point.bytes / static_cast<double>(points.size());
  }
  double times = 0, sizes = 0, both = 0;
  for (const Point& point : points) {
    const double s = point.at_s - mean_s, bytes = point.bytes - mean_bytes;
    times += s * s;
    sizes += bytes * bytes;
    both += s * bytes;
  }
  if (times == 0 || sizes == 0) return {};
  return {both / times, both * both / (times * sizes)};
}

// The samples [begin, end) of the second half of the time until the process held most. Empty if it
// held most long before its end.
struct Window {
  size_t begin = 0;
  size_t end = 0;
};

Window window_of(const WatchRecord& record, const TimelineTrack& track) {
  uint64_t most = 0;
  for (const OwnedMemory& owned : track.owned) most = std::max(most, owned.total_bytes());
  Window window;
  for (size_t s = 0; s < track.owned.size(); ++s) {
    if (track.owned[s].total_bytes() >= most - most / 10) window.end = s + 1;
  }
  if (window.end == 0) return {};
  const double life_s = track.process->end_s - track.process->begin_s;
  const double peak_s = record.samples[window.end - 1].at_s - track.process->begin_s;
  if (peak_s < 0.75 * life_s) return {};
  const auto is_later = [&](const WatchSample& sample) {
    return sample.at_s >= track.process->begin_s + peak_s / 2;
  };
  const auto begin = std::find_if(record.samples.begin(), record.samples.end(), is_later);
  window.begin = static_cast<size_t>(begin - record.samples.begin());
  return window;
}

std::optional<WatchGrowth> growth_of(const WatchRecord& record, const TimelineTrack& track) {
  if (track.process == nullptr) return std::nullopt;
  const Window window = window_of(record, track);
  if (window.end < window.begin + kFewestSamples) return std::nullopt;
  const auto line_of = [&](auto bytes_at) {
    std::vector<Point> points;
    for (size_t s = window.begin; s < window.end; ++s) {
      points.push_back({record.samples[s].at_s, static_cast<double>(bytes_at(track.owned[s]))});
    }
    return line_through(points);
  };
  WatchGrowth growth{.process = track.process};
  growth.seconds = record.samples[window.end - 1].at_s - record.samples[window.begin].at_s;
  const Line line = line_of([](const OwnedMemory& owned) { return owned.total_bytes(); });
  growth.bytes_per_s = line.bytes_per_s;
  const double least = std::max<double>(
      16 * kMiB, 1.0 / 32 * static_cast<double>(track.owned[window.end - 1].total_bytes()));
  const bool is_large = growth.bytes_per_s * growth.seconds >= least;
  if (growth.seconds < kShortest_s || line.explained < kExplained || !is_large) return std::nullopt;
  for (const size_t owner : track.owners()) {
    const Line part = line_of([owner](const OwnedMemory& owned) { return owned.bytes(owner); });
    if (part.bytes_per_s <= growth.owner_bytes_per_s) continue;
    growth.owner = owner;
    growth.owner_bytes_per_s = part.bytes_per_s;
  }
  return growth;
}

}  // namespace

std::optional<WatchGrowth> growth_in(const WatchRecord& record) {
  std::optional<WatchGrowth> most;
  for (const TimelineTrack& track : tracks_of(record)) {
    const auto growth = growth_of(record, track);
    if (growth && (!most || growth->bytes_per_s > most->bytes_per_s)) most = growth;
  }
  return most;
}

std::string next_step(size_t owner, int pid) {
  if (owner == kCopiesSinceFork) {
    return "keep these pages out of forked children, or fork none (docs/guide/workers.md)";
  }
  if (owner < owner_of(MemoryKind{})) return "";
  const auto kind = static_cast<MemoryKind>(owner - owner_of(MemoryKind{}));
  switch (kind) {
    case MemoryKind::malloc_heap:
    case MemoryKind::malloc_arenas:
      return fmt::format(
          "small blocks, and tensors up to 32 MiB after the program has freed one of their size, "
          "in use or retained by malloc: in the program, `print(modicum.memory.attribute({{"
          "\"NAME\": tensors}}))` names tensors; if it names none that grow, start the command "
          "with {}",
          kind == MemoryKind::malloc_heap ? "MALLOC_MMAP_THRESHOLD_=65536" : "MALLOC_ARENA_MAX=2");
    case MemoryKind::stacks:
      return fmt::format("threads: `ls /proc/{}/task | wc -l` counts them", pid);
    case MemoryKind::file_copies:
      return "a file that is mapped privately and written, as by torch.load(mmap=True)";
    case MemoryKind::shared_memory:
      return "batches of data-loader workers, or files in /dev/shm: `ls -lS /dev/shm`; fewer "
             "workers, "
             "or a smaller prefetch_factor (docs/guide/workers.md)";
    default:
      return "tensors and other large blocks, or small Python objects: in the program, "
             "`print(modicum.memory.attribute({\"NAME\": tensors}))` tells them apart";
  }
}

}  // namespace modicum
