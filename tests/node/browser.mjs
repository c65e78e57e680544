// The demo page in a real browser: two windows, two users. The suite starts the server; what it shall do with it is
// asked for on standard output, one word a line (`kill`, `start`), and each is answered by a line on standard input.

import assert from "node:assert/strict";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const page_url = process.env.SERVER_PAGE;
const LIMIT = 20_000;
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

/** Has the suite do something to the server. */
async function ask(what) {
  console.log(what);
  const { value } = await lines.next();
  assert.equal(value, `${what} done`);
}

const faults = [];

/** A window with a profile of its own. */
async function open(browser, path, size) {
  const context = await browser.newContext({ viewport: size });
  const page = await context.newPage();
  page.setDefaultTimeout(LIMIT);
  page.on("pageerror", (error) => faults.push(`${path}: ${error}`));
  page.on("request", (request) => {
    const host = new URL(request.url()).host;
    if (host && host !== new URL(page_url).host) faults.push(`${path}: a request to ${request.url()}`);
  });
  await page.goto(page_url + path);
  return page;
}

class Pane {
  constructor(page, user) {
    this.page = page;
    this.user = user;
    this.root = page.locator(`#pane-${user}`);
  }

  async state(state) {
    await this.root.locator(`.status[data-state=${state}]`).waitFor();
  }

  async write(text) {
    await this.root.locator("input[name=text]").fill(text);
    await this.root.locator("button.send").click();
  }

  message(text) {
    return this.root.locator(".messages > .message", { has: this.page.getByText(text, { exact: true }) });
  }

  async shows(text, whose) {
    const message = this.message(text);
    await message.waitFor();
    assert.equal(await message.count(), 1, `${this.user} has "${text}" once`);
    assert.match(await message.getAttribute("class"), new RegExp(`\\b${whose}\\b`));
  }

  async ticks(text, state) {
    await this.message(text).locator(`.ticks[data-state=${state}]`).waitFor();
  }

  texts() {
    return this.root.locator(".messages > .message .body").allTextContents();
  }

  numbers() {
    const all = this.root.locator(".messages > .message");
    return all.evaluateAll((items) => items.map((item) => Number(item.dataset.seq)));
  }
}

const browser = await chromium.launch({
  executablePath: process.env.BROWSER,
  headless: true,
  args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
});
try {
  const size = { width: 640, height: 720 };
  const first = await open(browser, "/?user=alice&to=bob", size);
  const second = await open(browser, "/?user=bob&to=alice", size);
  const [alice, bob] = [new Pane(first, "alice"), new Pane(second, "bob")];
  await alice.state("online");
  await bob.state("online");

  // They chat, and see what has arrived and been read.
  await alice.write("Hello Bob");
  await bob.shows("Hello Bob", "theirs");
  await alice.shows("Hello Bob", "mine");
  await alice.ticks("Hello Bob", "read");
  await bob.write("Hello Alice");
  await alice.shows("Hello Alice", "theirs");
  await bob.ticks("Hello Alice", "read");

  // Text is text.
  const markup = `<b>bold</b><img src=x onerror="document.title='broken'">`;
  await alice.write(markup);
  await bob.shows(markup, "theirs");
  assert.equal(await second.locator(".message b, .message img").count(), 0);

  // Many, quickly, from both sides: one order for both.
  for (let n = 1; n <= 10; n++) {
    await alice.write(`a${n}`);
    await bob.write(`b${n}`);
  }
  for (const pane of [alice, bob]) {
    await pane.message("a10").waitFor();
    await pane.message("b10").waitFor();
  }
  await alice.ticks("a10", "read");
  await bob.ticks("b10", "read");
  assert.deepEqual(await alice.texts(), await bob.texts());
  assert.equal((await alice.texts()).length, 23);

  // A reload has everything again.
  const before = await bob.texts();
  await second.reload();
  await bob.state("online");
  await bob.message("a10").waitFor();
  assert.deepEqual(await bob.texts(), before);

  // The server dies, and comes back; what was written meanwhile arrives once.
  await ask("kill");
  await alice.state("offline");
  await bob.state("offline");
  await alice.write("Are you there?");
  await alice.ticks("Are you there?", "sending");
  await ask("start");
  await alice.state("online");
  await bob.state("online");
  await bob.shows("Are you there?", "theirs");
  await alice.ticks("Are you there?", "read");
  await bob.write("I am back");
  await alice.shows("I am back", "theirs");
  await bob.ticks("I am back", "read");
  assert.deepEqual(await alice.texts(), await bob.texts());
  assert.deepEqual(await alice.texts(), [...before, "Are you there?", "I am back"]);
  const numbers = await alice.numbers();
  assert.deepEqual(numbers, numbers.map((_, n) => n + 1));

  // The page without parameters shows both users side by side.
  const third = await open(browser, "/", { width: 1100, height: 760 });
  const both = [new Pane(third, "alice"), new Pane(third, "bob")];
  for (const pane of both) {
    await pane.state("online");
    await pane.message("I am back").waitFor();
    assert.deepEqual(await pane.texts(), await alice.texts());
  }
  await both[0].write("From the third window");
  await both[1].shows("From the third window", "theirs");
  await bob.shows("From the third window", "theirs");
  await alice.shows("From the third window", "mine");
  await both[0].ticks("From the third window", "read");

  await third.screenshot({ path: `${process.env.SCREENSHOTS}/demo.png` });
  await first.screenshot({ path: `${process.env.SCREENSHOTS}/demo-alice.png` });
  assert.equal(await first.title(), "alice – Bowline demo");
  assert.deepEqual(faults, [], "no script failed and nothing was loaded from elsewhere");
  console.log("passed");
} finally {
  await browser.close();
}
process.exit(0);
