// A run's memory over time as one HTML file, which needs no network: the files of
// modicum/report/page, and dygraphs, which the build embeds (cmake/embed.cmake). Part of the door
// of `report`.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace modicum {

// A run of a page. `json` is a document with the keys `timeline` and `peak`, as `watch --json`
// prints it. Borrowed.
struct PageRun {
  std::string_view label;
  std::string_view json;
};
// The page of one run, or of several next to each other on one scale. `sentence` is shown above the
// charts. Names and texts may hold any characters: the page shows them and never interprets them.
std::string report_page(std::string_view title, std::span<const PageRun> runs,
                        std::string_view sentence = "");

// The text of modicum/report/page/FILE_NAME, or of a file of dygraphs; empty if there is no such
// file. Lives as long as the program.
std::string_view page_file(std::string_view file_name);

}  // namespace modicum
