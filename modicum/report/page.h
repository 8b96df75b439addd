// Shows a run's memory over time on one HTML page that needs no network. The build embeds its
// parts, the files of modicum/report/page and dygraphs (cmake/embed.cmake). Part of the public
// header of `report`.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace modicum {

// A run on a page. `json`: a document with the keys `timeline` and `peak`, as `watch --json`
// prints. Borrowed.
struct PageRun {
  std::string_view label;
  std::string_view json;
};
struct PageFact {
  std::string name;
  std::string value;
};
struct PageTable {
  std::string caption;
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows;
};
// Above the charts: a sentence and facts. Below them: tables. A browser without JavaScript shows
// `figures` in place of the charts.
struct PageText {
  std::string sentence;
  std::vector<PageFact> facts;
  std::vector<PageTable> tables;
  std::vector<PageTable> figures;
};
// The page of one run, or of several next to each other on one scale. Names and texts may hold any
// characters: none is interpreted as HTML.
std::string report_page(std::string_view title, std::span<const PageRun> runs,
                        const PageText& text = {});

// The embedded text of modicum/report/page/FILE_NAME or of a file of dygraphs, with static
// lifetime; empty if there is no such file.
std::string_view page_file(std::string_view file_name);

}  // namespace modicum
