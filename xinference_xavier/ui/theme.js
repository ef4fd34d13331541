/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs once: light or dark as in the web UI of the same server, also when that changes in another
 * tab. Without a choice there, Gradio's own rule stays: as the system has it. */
() => {
  const apply = () => {
    const theme = window.localStorage.getItem("theme");
    if (theme) document.body.classList.toggle("dark", theme === "dark");
  };
  window.addEventListener("storage", apply);
  apply();
}
