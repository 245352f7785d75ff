// Tables and code that scroll sideways can be reached and scrolled by keyboard.
document.addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .figure, .highlight > pre > code, pre > code")) {
    box.tabIndex = 0;
  }
});
