// Checks what a browser is made to ask. Every web page that somebody looks at can send requests to
// a server on their machine, or in their network; two headers, which pages cannot choose, tell.
//
// Origin is the page that asks: it must be the server's own, by the name in Host, or an allowed
// one, which then may read the answer (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol).
// And a page can have the name of its own server lead to 127.0.0.1 (DNS rebinding): then Origin and
// Host agree, so on a server for its own machine, which asks for no key, Host must be a name or an
// address of that. Programs send no Origin, and the Host that they were given.
//
// Pure functions; any thread. `allowed`: origins in lower case, or "*" for all.
#pragma once

#include <string>
#include <vector>

#include "server/http/http_server.h"

namespace treadle {

// Why the request is refused; empty if it is not. `any_host`: whatever Host says.
std::string Stranger(const HttpRequest& request, const std::vector<std::string>& allowed,
                     bool any_host);

// Lines that the head of the answer gets, each after "\r\n", so that an allowed page may read it;
// empty if none asks.
std::string CorsLines(const HttpRequest& request, const std::vector<std::string>& allowed);

// To a browser that asks first whether an allowed page may send what it wants to.
HttpResponse PreflightAnswer(const HttpRequest& request, const std::string& methods);

}  // namespace treadle
