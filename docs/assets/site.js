// What the theme leaves out: regions that scroll sideways can be reached by keyboard, and the search has a name.
document.addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .figure, pre > code")) {
    box.tabIndex = 0;
  }
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
});
