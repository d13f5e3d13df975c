#include "server/http/http_origin.h"

#include <arpa/inet.h>

#include <algorithm>
#include <string_view>

#include "absl/strings/ascii.h"
#include "base/quoted.h"
#include "base/status.h"
#include "net/address.h"

namespace treadle {
namespace {

std::string Lower(const HttpRequest& request, const std::string& name) {
  const std::string_view value = request.Header(name);
  return absl::AsciiStrToLower(absl::string_view(value.data(), value.size()));
}

// "example.org:80" of "http://example.org:80".
std::string_view AuthorityOf(std::string_view origin) {
  const size_t scheme = origin.find("://");
  return scheme == origin.npos ? std::string_view() : origin.substr(scheme + 3);
}

// The entry of `allowed` that allows it; null: none does.
const std::string* Allowed(const std::string& origin, const std::vector<std::string>& allowed) {
  const auto found = std::ranges::find_if(
      allowed, [&](const std::string& entry) { return entry == "*" || entry == origin; });
  return found == allowed.end() ? nullptr : &*found;
}

// Host without its port.
bool IsOfThisMachine(const std::string& host) {
  const size_t bracket = host.find(']');
  const bool bracketed = host.starts_with('[') && bracket != host.npos;
  const std::string name = bracketed ? host.substr(1, bracket - 1) : host.substr(0, host.find(':'));
  in6_addr address{};
  return IsLoopback(name) || name.ends_with(".localhost") ||
         inet_pton(bracketed ? AF_INET6 : AF_INET, name.c_str(), &address) == 1;
}

}  // namespace

std::string Stranger(const HttpRequest& request, const std::vector<std::string>& allowed,
                     bool any_host) {
  const std::string host = Lower(request, "host"), origin = Lower(request, "origin");
  const auto has_host = [&](const std::string& entry) {
    return entry == "*" || AuthorityOf(entry) == host;
  };
  if (!any_host && !host.empty() && !IsOfThisMachine(host) &&
      std::ranges::none_of(allowed, has_host)) {
    return Str("the header Host is ", Quoted(host),
               ", expected localhost or an address: without keys and TLS this server is for its "
               "own machine (the name of a proxy: --http-allow-origin)");
  }
  const bool own = !host.empty() && AuthorityOf(origin) == host;
  if (origin.empty() || own || Allowed(origin, allowed) != nullptr) return "";
  return Str("the header Origin is ", Quoted(origin),
             ", expected this server's own page, or one of --http-allow-origin");
}

std::string CorsLines(const HttpRequest& request, const std::vector<std::string>& allowed) {
  const std::string origin = Lower(request, "origin");
  const std::string* const entry = origin.empty() ? nullptr : Allowed(origin, allowed);
  if (entry == nullptr) return "";
  return "\r\nAccess-Control-Allow-Origin: " + *entry +
         "\r\nAccess-Control-Expose-Headers: X-Request-Id, X-Request-Number, Retry-After\r\nVary: "
         "Origin";
}

HttpResponse PreflightAnswer(const HttpRequest& request, const std::string& methods) {
  HttpResponse response{
      .code = 204,
      .headers = {{"Access-Control-Allow-Methods", methods}, {"Access-Control-Max-Age", "600"}}};
  const std::string_view headers = request.Header("access-control-request-headers");
  if (!headers.empty()) {
    response.headers.push_back({"Access-Control-Allow-Headers", std::string(headers)});
  }
  return response;
}

}  // namespace treadle
