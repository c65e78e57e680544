//! Signs tokens: for `bowline token` and for the API.

use crate::{
    cli::Failure,
    config::{Auth, Config},
    data::DataDir,
    random_text,
};
use anyhow::{Context, anyhow};
use bowline_api::NewToken;
use bowline_auth::{Claims, SessionMode, mint};
use bowline_protocol::{DeviceId, Millis, UserId};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// Who signs tokens where Bowline can only judge them.
pub fn cannot_sign(auth: &Auth) -> String {
    let judges = auth.judges();
    let signs = match judges.contains(&"auth.hook_url") {
        true if judges.len() == 1 => "the application issues them",
        true => "the application, or whoever holds the private key, issues them",
        false => "whoever holds the private key signs them",
    };
    format!("tokens are judged with {}: {signs}", judges.join(" and "))
}

pub struct Signer {
    secret: String,
    audience: Option<String>,
    issuer: Option<String>,
}

impl Signer {
    pub fn new(secret: &str, config: &Config) -> Self {
        Self {
            secret: secret.to_owned(),
            audience: config.auth.audience.clone(),
            issuer: config.auth.issuer.clone(),
        }
    }

    /// With the configured secret, or with the one of the data directory.
    pub fn for_config(config: &Config) -> Result<Self, Failure> {
        if config.auth.sessions == SessionMode::Required {
            return Err(Failure::Usage(anyhow!(
                "auth.sessions = \"required\": a token must name a session of the running server; ask its API, POST \
                 /api/v1/tokens"
            )));
        }
        match (&config.auth.secret, config.auth.has_key()) {
            (Some(secret), _) => Ok(Self::new(secret, config)),
            (None, true) => {
                Err(Failure::Usage(anyhow!("{}; Bowline cannot sign tokens then", cannot_sign(&config.auth))))
            }
            (None, false) => {
                let secret = DataDir::existing(&config.node.data)?.secret(DataDir::TOKEN_SECRET)?;
                Ok(Self::new(&secret, config))
            }
        }
    }

    /// A token of a session, and when it runs out.
    pub fn sign_for_session(&self, wanted: NewToken, sid: &str) -> anyhow::Result<(String, Millis)> {
        let claims = Claims {
            device: wanted.device,
            token_id: Some(random_text()?.into()),
            session_id: Some(sid.into()),
            rooms: wanted.rooms,
            audience: self.audience.clone(),
            issuer: self.issuer.clone(),
            ..Claims::new(wanted.user, crate::now_ms(), wanted.ttl_ms)
        };
        Ok((mint(self.secret.as_bytes(), &claims), claims.expires_at()))
    }

    pub fn sign(&self, user: &UserId, device: Option<&DeviceId>, ttl: Duration) -> anyhow::Result<String> {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let claims = Claims {
            device: device.cloned(),
            token_id: Some(random_text()?.into()),
            audience: self.audience.clone(),
            issuer: self.issuer.clone(),
            ..Claims::new(user.clone(), crate::now_ms(), ttl_ms)
        };
        Ok(mint(self.secret.as_bytes(), &claims))
    }
}

/// Where the tokens of many users come from.
pub enum Tokens {
    /// One for everybody.
    Given(String),
    /// Demo tokens of the server whose WebSocket is at this URL.
    Demo {
        url: String,
        ca: Option<PathBuf>,
    },
    Signed(Signer),
}

/// How long the tokens of `chat` and `bench` are good.
const TTL: Duration = Duration::from_secs(24 * 3600);
/// How long a server may take to give a demo token.
const DEMO_TIMEOUT: Duration = Duration::from_secs(5);
/// Demo tokens that are asked for at once.
const DEMO_ASKED_MAX: usize = 32;

impl Tokens {
    /// Whether everybody is the same user.
    pub fn is_shared(&self) -> bool {
        matches!(self, Self::Given(_))
    }

    pub fn one(&self, user: &str) -> anyhow::Result<String> {
        let mut all = self.many(std::iter::once(user.to_owned()))?;
        all.pop().context("there is no token")
    }

    /// One for each user, in their order; only one when all share it.
    pub fn many(&self, users: impl Iterator<Item = String>) -> anyhow::Result<Vec<String>> {
        match self {
            Self::Given(token) => Ok(vec![token.clone()]),
            Self::Demo { url, ca } => demo(url, ca.as_deref(), users.collect()),
            Self::Signed(signer) => {
                users.map(|user| signer.sign(&UserId::parse(&user)?, None, TTL)).collect()
            }
        }
    }
}

/// Demo tokens of the server whose WebSocket is at `url`; servers without a configured key give them on loopback.
/// `ca` is the file whose issuers are trusted, beside those of the system.
fn demo(url: &str, ca: Option<&Path>, users: Vec<String>) -> anyhow::Result<Vec<String>> {
    let schemes = [("ws://", "http"), ("wss://", "https")];
    let mut found = schemes.iter().filter_map(|(ws, http)| Some((http, url.strip_prefix(ws)?)));
    let (scheme, rest) = found.next().with_context(|| format!("{url} is no WebSocket address"))?;
    let ask = format!("{scheme}://{}/demo/token", rest.split('/').next().unwrap_or_default());
    let trusted = match ca {
        Some(path) => {
            let text = std::fs::read(path).with_context(|| format!("{} cannot be read", path.display()))?;
            reqwest::Certificate::from_pem_bundle(&text)?
        }
        None => Vec::new(),
    };
    // On a thread of its own: it is called from asynchronous code as well, which must not be blocked by a second runtime.
    let asking = move || -> anyhow::Result<Vec<String>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(demo_many(ask, trusted, users))
    };
    std::thread::spawn(asking).join().map_err(|_| anyhow!("asking for a demo token failed"))?
}

async fn demo_many(
    ask: String,
    trusted: Vec<reqwest::Certificate>,
    users: Vec<String>,
) -> anyhow::Result<Vec<String>> {
    let client = reqwest::Client::builder().timeout(DEMO_TIMEOUT).tls_certs_merge(trusted).build()?;
    let mut tokens = vec![String::new(); users.len()];
    let mut asked = tokio::task::JoinSet::new();
    let mut users = users.into_iter().enumerate();
    loop {
        while asked.len() < DEMO_ASKED_MAX
            && let Some((number, user)) = users.next()
        {
            let (client, ask) = (client.clone(), ask.clone());
            asked.spawn(async move { Ok((number, demo_one(&client, ask, &user).await?)) });
        }
        match asked.join_next().await {
            Some(answer) => {
                let (number, token) = answer.map_err(anyhow::Error::from).flatten()?;
                tokens[number] = token;
            }
            None => return Ok(tokens),
        }
    }
}

async fn demo_one(client: &reqwest::Client, ask: String, user: &str) -> anyhow::Result<String> {
    let body = serde_json::json!({ "user": user }).to_string();
    let request = client.post(ask).header("content-type", "application/json").body(body);
    let text = request.send().await?.error_for_status()?.text().await?;
    let answer: serde_json::Value = serde_json::from_str(&text)?;
    answer["token"].as_str().map(str::to_owned).context("the server's answer has no token")
}
