// SPDX-License-Identifier: Apache-2.0
import { defineConfig } from "vitest/config";

export default defineConfig({
  build: {
    lib: { entry: "src/main.ts", formats: ["es"], fileName: () => "launch.js" },
    outDir: "../xinference_xavier/extension/web",
    emptyOutDir: true,
    target: "es2022",
    license: false,
  },
  test: { environment: "jsdom", include: ["tests/*.test.ts"] },
});
