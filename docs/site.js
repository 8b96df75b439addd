// For keyboards and screen readers: wide tables and code scroll, and the search has a name.
document$.subscribe(() => {
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap")) wide.tabIndex = 0;
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
});
