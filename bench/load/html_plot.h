// Pages with plots as inline SVG: one file, without scripts, and without anything from elsewhere.
// Pure.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace treadle {

struct Curve {
  std::string name;
  std::vector<std::pair<double, double>> points;  // none negative
};

// Text as HTML has it.
std::string HtmlOf(const std::string& text);
// The cell of a table's head that names curve i of every plot.
std::string CurveHead(size_t i, const std::string& name);
// Axes begin at 0. Empty if no point lies off them.
std::string Plot(const std::string& title, const std::string& x_label, const std::string& y_label,
                 const std::vector<Curve>& curves);
// A whole page. `title` is text, `body` HTML.
std::string HtmlPage(const std::string& title, const std::string& body);

}  // namespace treadle
