#include "modicum/report/page.h"

#include <fmt/format.h>

#include "modicum/base/base.h"
#include "modicum/json/json.h"
#include "modicum/report/owners.h"

namespace modicum {
namespace {

std::string replaced(std::string_view text, char from, std::string_view by) {
  std::string result;
  for (const char c : text) {
    if (c == from) {
      result += by;
    } else {
      result += c;
    }
  }
  return result;
}

std::string html_text(std::string_view text) {
  return replaced(replaced(replaced(text, '&', "&amp;"), '<', "&lt;"), '"', "&quot;");
}

// In JSON `<` occurs in strings only. Without it no string can end the script element or begin a
// comment.
std::string document_of(std::span<const PageRun> runs, const PageText& text) {
  JsonWriter out;
  const auto array_of = [&](std::span<const std::string> texts) {
    out.begin_array();
    for (const std::string& element : texts) out.value(element);
    out.end_array();
  };
  out.begin_object().key("owners").begin_object();
  for (const OwnerWords& entry : owners_in_words()) out.member(entry.owner, entry.words);
  out.end_object().member("sentence", text.sentence).key("facts").begin_object();
  for (const PageFact& fact : text.facts) out.member(fact.name, fact.value);
  out.end_object().key("tables").begin_array();
  for (const PageTable& table : text.tables) {
    out.begin_object().member("caption", table.caption).key("head");
    array_of(table.head);
    out.key("rows").begin_array();
    for (const auto& row : table.rows) array_of(row);
    out.end_array().end_object();
  }
  out.end_array().key("runs").begin_array();
  std::string document = out.take();  // the documents of the runs are JSON already
  for (const PageRun& run : runs) {
    JsonWriter label;
    label.value(run.label);
    document += document.back() == '[' ? "" : ",";
    document += "{\"label\":" + label.text() + ",\"document\":" + std::string(run.json) + "}";
  }
  return replaced(document + "]}", '<', "\\u003c");
}

std::string html_row(std::span<const std::string> cells, std::string_view kind) {
  std::string html = "<tr>";
  for (size_t i = 0; i < cells.size(); ++i) {
    const std::string_view tag = i == 0 ? "th" : kind;
    html += fmt::format("<{0}>{1}</{0}>", tag, html_text(cells[i]));
  }
  return html + "</tr>\n";
}

std::string html_table(const PageTable& table) {
  std::string html = fmt::format("<table>\n<caption>{}</caption>\n", html_text(table.caption));
  html += html_row(table.head, "th");
  for (const auto& row : table.rows) html += html_row(row, "td");
  return html + "</table>\n";
}

// What a browser without JavaScript shows.
std::string static_html(const PageText& text) {
  std::string html;
  if (!text.sentence.empty()) {
    html += fmt::format("<p>{}</p>\n", replaced(html_text(text.sentence), '\n', "<br>\n"));
  }
  if (!text.facts.empty()) {
    html += "<dl>\n";
    for (const PageFact& fact : text.facts) {
      html += fmt::format("<dt>{}</dt><dd>{}</dd>\n", html_text(fact.name), html_text(fact.value));
    }
    html += "</dl>\n";
  }
  for (const PageTable& table : text.figures) html += html_table(table);
  for (const PageTable& table : text.tables) html += html_table(table);
  return html;
}

// A file of dygraphs without the address of its source map, which browsers would request.
std::string_view library_file(std::string_view file_name) {
  const std::string_view text = page_file(file_name);
  const size_t map = text.rfind("# sourceMappingURL=");
  // The comment begins two characters earlier, with "//" or "/*".
  return map == std::string_view::npos ? text : text.substr(0, map - 2);
}

}  // namespace

std::string report_page(std::string_view title, std::span<const PageRun> runs,
                        const PageText& text) {
  const auto text_of = [&](std::string_view name) -> std::string {
    if (name == "title") return html_text(title);
    if (name == "document") return document_of(runs, text);
    if (name == "static") return static_html(text);
    if (name == "copyright") return html_text(page_file(name));
    if (name.starts_with("dygraph")) return std::string(library_file(name));
    return std::string(page_file(name));
  };
  // Replaces each "@name@" of page.html by its text, in which no names are replaced.
  std::string page;
  std::string_view rest = page_file("page.html");
  for (size_t at = rest.find('@'); at != std::string_view::npos; at = rest.find('@')) {
    const size_t end = rest.find('@', at + 1);
    MODICUM_ASSERT(end != std::string_view::npos);
    page += rest.substr(0, at);
    page += text_of(rest.substr(at + 1, end - at - 1));
    rest.remove_prefix(end + 1);
  }
  return page += rest;
}

}  // namespace modicum
