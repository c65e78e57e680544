// One user of a group in the demo page: waits for what the others say, and says something itself. The words of the
// others are the arguments.

import { chromium } from "playwright-core";

const LIMIT = 30_000;
const browser = await chromium.launch({
  executablePath: process.env.BROWSER,
  headless: true,
  args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
});
try {
  // As narrow as a phone.
  const page = await (await browser.newContext({ viewport: { width: 390, height: 700 } })).newPage();
  page.setDefaultTimeout(LIMIT);
  await page.goto(process.env.SERVER_PAGE);
  const pane = page.locator(".pane");
  await pane.locator(".status[data-state=online]").waitFor();
  console.log("online");
  await pane.locator("input[name=text]").fill("from the page");
  await pane.locator("button.send").click();
  for (const text of process.argv.slice(2)) {
    await pane.locator(".messages .message", { has: page.getByText(text, { exact: true }) }).waitFor();
  }
  await page.screenshot({ path: `${process.env.SCREENSHOTS}/group.png` });
  console.log("passed");
} finally {
  await browser.close();
}
