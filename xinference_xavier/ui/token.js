/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs before each call of the page: without a token that the visitor gave, it shows the one of
 * the login to the web UI. That is where this page was opened from, whose tab keeps its token
 * fresh, or this very tab. "no_auth" is the web UI's word for a server that asks for none. */
(given, ...rest) => {
  const stores = [() => window.opener.sessionStorage, () => window.sessionStorage];
  let token = given;
  for (const store of stores) {
    if (token) break;
    try {
      token = store().getItem("token");
    } catch {
      /* nobody opened it, or the other tab has gone elsewhere */
    }
    if (token === "no_auth") token = "";
  }
  return [token || "", ...rest];
}
